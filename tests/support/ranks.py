"""Ranks as real processes over gloo. A fork server that has imported everything, and made a step, starts one in about
0.1 s."""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.commands import HANG_SECONDS, REPOSITORY
from support.gpus import use_gpu


CONTEXT = multiprocessing.get_context("forkserver")
# What a Trainer, DeepSpeed and we import late would take seconds of every rank. In a short run pytest takes as much as
# all else.
CONTEXT.set_forkserver_preload(
    [
        "torch._inductor.compile_fx",
        "transformers.trainer",
        "datasets",
        "deepspeed",
        "trl.trainer.sft_trainer",
        "distca_hf.integrations.trainer.attach",
        "distca_hf.plugin",
        "distca_hf.runtime.op",
        "distca_hf.servers.server",
        "transformers.models.llama.modeling_llama",
        "pytest",
        "support.first_step",
    ]
)
# A start asks every child of this process for its exit code, and an exit code can be read but once: runs in several
# threads take turns.
CHILDREN = threading.Lock()
# Makes a rank print where its threads are, and the time that it is given for it.
SHOW_STACKS, STACKS_SECONDS = signal.SIGUSR2, 2.0


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    Attributes:
        exit_code: 0, or minus the signal that killed it.
        result: what its function returned; None if it did not return.
        output: the end of its standard output and error.
    """

    rank: int
    exit_code: int
    result: Any
    output: str


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    backend: str = "gloo",
    servers: int = 0,
    before_serving: Callable[[], None] | None = None,
) -> list[Any]:
    """Runs `function(*arguments)` on every rank of a group, successfully; returns the results by rank.

    Args:
        servers: attention servers beside them; they must end well, too, and have no result.
        before_serving: called in every server first.
    """
    outcomes = start_ranks(
        world_size, function, folder, *arguments, backend=backend, servers=servers, before_serving=before_serving
    )
    failed = [outcome for outcome in outcomes if outcome.exit_code]
    if failed:
        raise AssertionError(
            "\n".join(
                f"--- rank {outcome.rank} ended with {outcome.exit_code}\n{outcome.output}" for outcome in failed
            )
        )
    return [outcome.result for outcome in outcomes[:world_size]]


def start_ranks(
    world_size: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    backend: str = "gloo",
    meanwhile: Callable[[list[Any]], None] | None = None,
    endless: frozenset[int] = frozenset(),
    servers: int = 0,
    before_serving: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Runs ranks to their end, whatever it is; kills what hangs.

    Args:
        meanwhile: called with the processes once all are started, to do harm to them.
        endless: ranks that will not end by themselves, and are not waited for.
        servers: attention servers, which come behind the ranks.
        before_serving: called in every server first, to do harm to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launcher = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if servers else None
    job = Job(world_size, servers, None if launcher is None else launcher.port, str(folder), backend, before_serving)
    deadline = time.monotonic() + HANG_SECONDS
    # What the fork server has imported may have looked at the GPUs, which a forked process then cannot use.
    context = multiprocessing.get_context("spawn") if backend == "nccl" else CONTEXT
    if context is CONTEXT:
        _start_fork_server()
    processes = [
        context.Process(target=_rank_main, args=(rank, job, function, arguments), daemon=True)
        for rank in range(world_size + servers)
    ]
    for process in processes:
        with CHILDREN:
            process.start()
    running = set(range(len(processes))) - endless
    if meanwhile is not None:
        meanwhile(processes)
    while running and time.monotonic() < deadline:
        wait([processes[rank].sentinel for rank in running], timeout=deadline - time.monotonic())
        running -= {rank for rank in running if _exit_code(processes[rank]) is not None}
    outcomes = []
    for rank, process in enumerate(processes):
        exit_code = _exit_code(process)
        if exit_code is None:
            exit_code = -int(signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                if rank not in endless:
                    os.kill(process.pid, SHOW_STACKS)
                    time.sleep(STACKS_SECONDS)
                os.kill(process.pid, signal.SIGKILL)
            wait([process.sentinel])
            _log(folder, rank).open("a").write(f"\nkilled: still running after {HANG_SECONDS} s\n")
        result = folder / f"result-{rank}.pt"
        outcomes.append(
            Outcome(
                rank=rank,
                exit_code=exit_code,
                result=torch.load(result, weights_only=False) if result.is_file() else None,
                output=_log(folder, rank).read_text(errors="replace")[-6000:] if _log(folder, rank).is_file() else "",
            )
        )
    return outcomes


def _start_fork_server() -> None:
    """Starts it if there is none. It finds modules of tests by a variable: multiprocessing sets the path of no other
    processes than those that it forks."""
    usual = os.environ.get("PYTHONPATH")
    with CHILDREN:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), usual]))
        forkserver.ensure_running()
        if usual is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = usual


def _exit_code(process: Any) -> int | None:
    with CHILDREN:
        return process.exitcode


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


@dataclass(frozen=True)
class Job:
    """Processes that are started together.

    Attributes:
        servers: processes behind the ranks that run no function, but serve them.
        launcher_port: of the store that a launcher would keep beside them; None for none.
    """

    world_size: int
    servers: int
    launcher_port: int | None
    folder: str
    backend: str
    before_serving: Callable[[], None] | None


def _rank_main(rank: int, job: Job, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Body of a rank's process: output into a file, group over a file, result into a file."""
    world_size, folder, backend = job.world_size, job.folder, job.backend
    log = os.open(_log(Path(folder), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(SHOW_STACKS)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    if job.servers:
        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="True",
            MASTER_PORT=str(job.launcher_port),
            DISTCA_JOB_SECRET="of a test",
            DISTCA_LAUNCHED_SERVERS=str(job.servers),
            DISTCA_ATTENTION_SERVERS=str(job.servers),
        )
    if backend == "nccl":
        use_gpu(rank)
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        if rank >= world_size:
            from distca_hf.servers.server import serve_job

            if job.before_serving is not None:
                job.before_serving()
            os._exit(serve_job(rank - world_size, world_size, job.servers))
        dist.init_process_group(
            backend,
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=HANG_SECONDS),
        )
        result = function(*arguments)
        torch.save(result, Path(folder) / f"result-{rank}.pt")
        _end_service(rank, job)
        if dist.is_initialized():  # a script that is alone has ended it
            dist.barrier()
        sys.stdout.flush()
    except BaseException as error:
        sys.stdout.flush()
        traceback.print_exc()
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of an ordinary script
        sys.stderr.flush()
        if rank < world_size:
            _end_service(rank, job)
        os._exit(1)
    os._exit(0)


def _end_service(rank: int, job: Job) -> None:
    """Does what `distca_hf.run` does when a script has ended."""
    if job.servers:
        from distca_hf.servers.job_store import note_end

        note_end(rank)
