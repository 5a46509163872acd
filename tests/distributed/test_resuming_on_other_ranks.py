"""Training goes on on another number of ranks: counted over all of them, every document once per epoch."""

from collections import Counter
from pathlib import Path

import pytest

import distca_hf
from support.ranks import run_ranks
from support.resuming import TOKENS_PER_RANK, all_tokens, count_tokens, numbered_trainer, resumes_on_cpu_ranks, train


def _train(folder: Path, accumulation: int, resume: bool, stop_at: int | None) -> tuple[Counter[int], int, int, float]:
    """Tokens that this rank has trained, steps made, steps in all, and epochs."""
    trainer = numbered_trainer(folder, num_train_epochs=2, gradient_accumulation_steps=accumulation)
    distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, pad_to_multiple_of=1).attach(trainer)
    seen = count_tokens(trainer)
    train(trainer, resume, stop_at)
    return seen, trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch


@resumes_on_cpu_ranks
@pytest.mark.parametrize(("worlds", "accumulation"), [((1, 3, 2), (1, 3, 1)), ((4, 1, 3), (1, 1, 3))], ids=str)
def test_every_document_is_trained_once_per_epoch_on_all_ranks_together(
    worlds: tuple[int, int, int], accumulation: tuple[int, int, int], tmp_path: Path
) -> None:
    seen: Counter[int] = Counter()
    for at, stop in enumerate((3, 5, None)):
        ranks = run_ranks(
            worlds[at], _train, tmp_path / f"ranks-{at}", tmp_path / "run", accumulation[at], at > 0, stop
        )
        for tokens, *_ in ranks:
            seen += tokens
        assert len({tuple(numbers) for _, *numbers in ranks}) == 1

    _, steps, max_steps, epochs = ranks[0]
    assert seen == all_tokens(2)
    assert steps == max_steps
    assert epochs == 2.0
