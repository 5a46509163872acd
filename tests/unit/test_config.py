"""Settings: defaults, environment, YAML, which of them wins, and what is refused."""

import copy
import dataclasses
import inspect
import os
import pydoc
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from distca_hf.config import (
    ENVIRONMENT_PREFIX,
    OF_RECIPE,
    Debug,
    DistCAConfig,
    Timeouts,
    unknown_environment_settings,
    variable_of,
)
from distca_hf.errors import ConfigError, UnknownSettingError
from distca_hf.launched import (
    LaunchedProcess,
    launched_nodes,
    launched_process,
    launched_servers,
)
from distca_hf.plugin import DistCAPlugin
from distca_hf.recipe import Recipe, read_yaml
from distca_hf.settings import fields_of, values_of


NAMES = list(fields_of(DistCAConfig))
# Defaults, and other values.
VALUES: dict[str, tuple[Any, Any]] = {
    "tokens_per_rank": (0, 1234),
    "overlong": ("error", "split"),
    "stream_buffer_tokens": (0, 65536),
    "skip_bad_rows": (False, True),
    "pad_to_multiple_of": (128, 7),
    "kernel": ("auto", "reference"),
    "kv_residency": ("auto", "keep"),
    "kv_budget_gib": (4.0, 0.5),
    "exchange_chunks": (0, 3),
    "checkpointed_attention": ("save", "recompute"),
    "mlp_tokens": (0, 4096),
    "attention_kv_heads": (0, 2),
    "shared_prefix_tokens": (256, 0),
    "evaluate": ("local", "distca"),
    "regroup_steps": (True, False),
    "ranks_per_node": (0, 4),
    "attention_servers": ("0", "0,8"),
    "trainers_attend": (True, False),
    "server_speed": (0.0, 0.25),
    "kernel_times": ("", "times.json"),
    "deterministic": (False, True),
    "save_on_signal": (True, False),
    "metrics": ("basic", "all"),
    "report_every_steps": (0, 50),
    "report_folder": ("", "traces"),
    "prefetch": (2, 5),
    "plans_in_flight": (8, 3),
    "timeouts.exchange_seconds": (300.0, 12.5),
    "timeouts.agreement_seconds": (1800.0, 60.0),
    "timeouts.heartbeat_limit_seconds": (3.0, 1.5),
    "debug.check_exchanges": (False, True),
    "debug.check_finite": (False, True),
    "debug.check_weights_every_steps": (0, 100),
}
DEFAULTS = {name: default for name, (default, _) in VALUES.items()}
OTHERS = {name: other for name, (_, other) in VALUES.items()}
CHOICES = {
    "overlong": ("error", "split", "truncate"),
    "kernel": ("auto", "flash4", "flash3", "flash2", "torch_varlen", "ffpa", "cpu", "reference"),
    "kv_residency": ("auto", "keep", "refetch"),
    "checkpointed_attention": ("save", "offload", "recompute"),
    "metrics": ("basic", "all"),
    "evaluate": ("local", "distca"),
}


@pytest.fixture(autouse=True)
def no_settings_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            monkeypatch.delenv(name)


def made(values: dict[str, Any], kind: type[DistCAConfig] = DistCAConfig) -> DistCAConfig:
    """Settings by name, those of groups with a dot."""
    groups: dict[str, dict[str, Any]] = {"debug": {}, "timeouts": {}}
    plain = {}
    for name, value in values.items():
        group, _, inner = name.rpartition(".")
        (groups[group] if group else plain)[inner] = value
    return kind(debug=Debug(**groups["debug"]), timeouts=Timeouts(**groups["timeouts"]), **plain)


def in_yaml(values: dict[str, Any]) -> str:
    """The same as a recipe has it, one group to a line."""
    groups = {
        group: {name.rpartition(".")[2]: value for name, value in values.items() if name.rpartition(".")[0] == group}
        for group in ("", "debug", "timeouts")
    }
    return yaml.safe_dump({"plugin": groups.pop("") | {group: inner for group, inner in groups.items() if inner}})


def flat(config: DistCAConfig) -> dict[str, object]:
    return values_of(config, DistCAConfig)


def from_recipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> DistCAConfig:
    """The settings of a script that a recipe starts."""
    environment = dict(os.environ)
    Recipe.read(path).prepare(environment)
    with monkeypatch.context() as patched:
        for name, text in environment.items():
            patched.setenv(name, text)
        return DistCAConfig()


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        DistCAConfig(**settings)
    return str(refused.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- where a value comes from


def test_defaults() -> None:
    assert flat(DistCAConfig()) == DEFAULTS


def test_every_setting_has_another_value_in_these_tests() -> None:
    assert list(VALUES) == NAMES
    assert not any(DEFAULTS[name] == OTHERS[name] for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_can_come_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable_of(name), str(OTHERS[name]))
    config = flat(DistCAConfig())

    assert config == {**DEFAULTS, name: OTHERS[name]}
    assert type(config[name]) is type(OTHERS[name])


@pytest.mark.parametrize("name", NAMES)
def test_explicit_value_beats_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable_of(name), str(OTHERS[name]))

    assert flat(made({name: DEFAULTS[name]}))[name] == DEFAULTS[name]


@pytest.mark.parametrize(
    ("text", "value"),
    [(text, True) for text in ("1", "true", "True", "TRUE", "yes", "on", "On")]
    + [(text, False) for text in ("0", "false", "False", "no", "NO", "off")],
)
def test_bools_in_the_environment(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_DETERMINISTIC", text)

    assert DistCAConfig().deterministic is value


@pytest.mark.parametrize("text", ["llama3_8b_128k", "", "5", "{"])
def test_settings_of_a_recipe_that_no_recipe_has_left_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OF_RECIPE, text)
    assert f"environment variable {OF_RECIPE}: distca_hf.run writes it (" in refusal()


@pytest.mark.parametrize("error", [ConfigError, TypeError])
def test_settings_are_given_by_name(error: type[Exception]) -> None:
    with pytest.raises(error, match="8192 has no name; write which setting it is, for example tokens_per_rank=8192"):
        DistCAConfig(8192)  # type: ignore[call-arg]
    with pytest.raises(error, match="DistCAConfig: unknown setting 'tokens'"):
        DistCAConfig(tokens=8192)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("written_name", "meant"),
    [
        ("tokens_per_rnak", "tokens_per_rank"),
        ("Kernel", "kernel"),
        ("evaluation", "evaluate"),
    ],
)
def test_the_nearest_setting_is_named_for_a_misspelt_one(written_name: str, meant: str, tmp_path: Path) -> None:
    assert refusal(**{written_name: 1}).endswith(f"unknown setting {written_name!r}. Did you mean {meant!r}?")
    with pytest.raises(ConfigError, match=f"settings.yaml: .* Did you mean {meant!r}"):
        Recipe.read(written(tmp_path, f"plugin:\n  {written_name}: 1\n"))


def test_a_name_that_is_near_to_none_gets_the_list_alone() -> None:
    message = refusal(max_length=1)

    assert "unknown setting 'max_length'. Known settings: tokens_per_rank, " in message


def test_a_subclass_may_take_arguments_of_its_own() -> None:
    class Mine(DistCAConfig):
        def __init__(self, size: int, **settings: Any) -> None:
            super().__init__(tokens_per_rank=size * 1024, **settings)

    assert Mine(2, prefetch=3) == Mine(size=2, prefetch=3)
    assert Mine(2).tokens_per_rank == 2048


@pytest.mark.parametrize("kind", [DistCAConfig, DistCAPlugin])
def test_settings_are_fixed_once_they_are_made(kind: type[DistCAConfig]) -> None:
    settings = kind(tokens_per_rank=4096)
    words = f"tokens_per_rank=5: settings of a {kind.__name__} are fixed, and this one was made with 4096"
    with pytest.raises(ConfigError, match=words) as refused:
        settings.tokens_per_rank = 5
    assert len(str(refused.value).splitlines()) == 1
    other = dataclasses.replace(settings, tokens_per_rank=5)

    assert (type(other), other.tokens_per_rank, settings.tokens_per_rank) == (kind, 5, 4096)


def test_attribute_that_is_a_misspelt_setting_is_refused() -> None:
    settings = DistCAConfig()
    with pytest.raises(ConfigError, match=r"unknown setting 'token_per_rank'\. Did you mean 'tokens_per_rank'"):
        settings.token_per_rank = 5  # type: ignore[attr-defined]
    settings.note = "of a program"  # type: ignore[attr-defined]


# --- groups


def test_group_that_is_no_group_is_refused() -> None:
    message = refusal(debug={"check_finite": True})

    assert message == "debug={'check_finite': True} must be of type Debug, not dict: debug=distca_hf.Debug(...)"


def test_name_with_a_dot_is_refused_where_it_is_no_name(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownSettingError, match=r"debug\.check_finite' is a setting of a group: debug=distca_hf.Debug"
    ):
        Recipe.read(written(tmp_path, "plugin:\n  debug.check_finite: on\n"))
    said = (
        r"'check_finite' is a setting of a group: debug=distca_hf.Debug\(check_finite=...\) in Python, "
        "check_finite in a section debug in recipes$"
    )
    with pytest.raises(UnknownSettingError, match=f"^DistCAPlugin: {said}"):
        DistCAPlugin(check_finite=True)  # type: ignore[call-arg]
    with pytest.raises(UnknownSettingError, match=said):
        setattr(DistCAConfig(), "check_finite", True)  # noqa: B010


def test_settings_of_a_group_are_fixed_and_misspelt_ones_are_named() -> None:
    debug = Debug()
    with pytest.raises(ConfigError, match=r"check_finite=True: settings of a Debug are fixed, .* made with False"):
        debug.check_finite = True
    with pytest.raises(UnknownSettingError, match=r"Debug: unknown setting 'finite'\. Did you mean 'check_finite'\?"):
        Debug(finite=True)  # type: ignore[call-arg]


def test_settings_can_be_copied() -> None:
    config = made(OTHERS)

    assert copy.deepcopy(config) == config
    assert dataclasses.replace(config, prefetch=9).prefetch == 9


# --- what help() shows


@pytest.mark.parametrize("settings", [DistCAConfig, DistCAPlugin])
def test_help_shows_every_setting_with_its_description_and_default(settings: type[DistCAConfig]) -> None:
    shown = pydoc.plain(pydoc.render_doc(settings))
    words = " ".join(shown.replace("|", " ").split())

    for name, field in fields_of(DistCAConfig).items():
        assert re.search(rf"\b{re.escape(name)} \(.*default {re.escape(repr(DEFAULTS[name]))}\):", shown), name
        assert " ".join(field.metadata["help"].split()) in words
        group, _, inner = name.rpartition(".")
        default = inspect.signature(settings).parameters[group or name].default
        assert (getattr(default, inner) if group else default) == DEFAULTS[name]


# --- refused values


@pytest.mark.parametrize(
    ("variable", "text", "kind"),
    [
        ("DISTCA_TOKENS_PER_RANK", "many", "a whole number"),
        ("DISTCA_TOKENS_PER_RANK", "", "a whole number"),
        ("DISTCA_TIMEOUTS_EXCHANGE_SECONDS", "5 minutes", "a number"),
        ("DISTCA_DEBUG_CHECK_FINITE", "maybe", "yes or no"),
        ("DISTCA_DETERMINISTIC", "", "yes or no"),
    ],
)
def test_text_that_is_no_value_is_refused_by_variable(
    variable: str, text: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    message = refusal()

    for part in (variable, repr(text), kind):
        assert part in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokens_per_rank", "-1"),
        ("kernel", "fastest"),
        ("kv_budget_gib", "inf"),
        ("attention_servers", "one"),
        ("timeouts.exchange_seconds", "0"),
        ("timeouts.exchange_seconds", "10000000000.0"),
        ("debug.check_weights_every_steps", "-1"),
    ],
)
def test_value_of_the_environment_is_refused_by_variable_and_another_one_by_setting(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable_of(name), text)
    assert re.match(f"environment variable {variable_of(name)}: {name}='?{text}.* must be ", refusal())
    assert made({name: DEFAULTS[name]})

    monkeypatch.delenv(variable_of(name))
    value = type(DEFAULTS[name])(text)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=f"^{name.rpartition('.')[2]}="):
        made({name: value})


@pytest.mark.parametrize(("name", "choices"), CHOICES.items())
def test_all_choices_are_accepted_and_others_refused(
    name: str, choices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in choices:
        assert getattr(DistCAConfig(**{name: choice}), name) == choice
    for wrong in ("none", "", choices[0].upper(), None, 1, True):
        message = refusal(**{name: wrong})
        for part in (f"{name}={wrong!r}", *choices):
            assert part in message
    monkeypatch.setenv(f"DISTCA_{name.upper()}", "fastest")
    assert "'fastest'" in refusal()


@pytest.mark.parametrize(
    ("names", "allowed", "wrong", "words"),
    [
        (["pad_to_multiple_of", "prefetch", "plans_in_flight"], [1], [0, -1, -(2**40)], "at least 1"),
        (["ranks_per_node", "exchange_chunks", "debug.check_weights_every_steps"], [0], [-1], "at least 0"),
        (["kv_budget_gib", "server_speed"], [0, 2], [-1, -0.5], "at least 0"),
        (["kv_budget_gib", "server_speed"], [], [float("nan"), float("inf")], "finite"),
        (["mlp_tokens", "ranks_per_node"], [2**31 - 1], [2**31, 10**20], "at most 2147483647"),
        (["exchange_chunks"], [256], [257, 10**5], "at most 256"),  # a step planned for minutes
        (["timeouts.exchange_seconds"], [20], [0, 0.0, -1, -0.5, float("nan")], "positive"),
        (["timeouts.agreement_seconds"], [1e9], [1e10], "at most 1000000000"),  # ranks hung when they opened groups
        (["timeouts.agreement_seconds"], [], [float("inf")], "finite"),
    ],
)
def test_numbers_have_limits(names: list[str], allowed: list[float], wrong: list[float], words: str) -> None:
    for name in names:
        for value in allowed:
            kept = flat(made({name: value}))[name]
            assert (kept, type(kept)) == (value, type(DEFAULTS[name])), "whole numbers are taken for others"
        for value in wrong:
            with pytest.raises(ConfigError, match=f"^{name.rpartition('.')[2]}={value} must be {re.escape(words)}"):
                made({name: value})


@pytest.mark.parametrize(
    ("name", "wrong", "kinds"),
    [
        ("tokens_per_rank", "8192", ("int", "str")),
        ("tokens_per_rank", None, ("int", "NoneType")),
        ("tokens_per_rank", True, ("int", "bool")),
        ("timeouts.exchange_seconds", True, ("float", "bool")),
        ("kv_budget_gib", "4", ("float", "str")),
        ("deterministic", 1, ("bool", "int")),
        ("kernel_times", 1, ("str", "int")),
        *(("attention_servers", wrong, ("str", type(wrong).__name__)) for wrong in (True, None, 1.0, (0, 8))),
    ],
)
def test_values_of_another_type_are_refused(name: str, wrong: Any, kinds: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        made({name: wrong})
    message = str(refused.value)

    assert f"{name.rpartition('.')[2]}={wrong!r}" in message
    assert f"must be of type {kinds[0]}, not {kinds[1]}" in message


# --- recipes


def test_every_setting_can_come_from_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flat(from_recipe(written(tmp_path, in_yaml(OTHERS)), monkeypatch)) == OTHERS


def test_recipe_beats_the_environment_and_leaves_the_rest_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCA_PREFETCH", "9")
    monkeypatch.setenv("DISTCA_PLANS_IN_FLIGHT", "9")
    config = from_recipe(written(tmp_path, "plugin:\n  prefetch: 3\n"), monkeypatch)

    assert (config.prefetch, config.plans_in_flight) == (3, 9)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tokens_per_gpu: 5\n", ["settings.yaml", "'tokens_per_gpu'", "Did you mean 'tokens_per_rank'?"]),
        ("prefetch: 2\nKernel: cpu\n", ["settings.yaml", "'Kernel'", "kernel"]),
        ("5: 6\n", ["settings.yaml", "unknown setting 5"]),
        ("tokens_per_rank: 8k\n", ["tokens_per_rank='8k'", "int"]),
        ("deterministic: 'yes'\n", ["deterministic='yes'", "bool"]),
        ("tokens_per_rank: -1\n", ["tokens_per_rank=-1", "at least 0"]),
        ("attention_servers: one\n", ["settings.yaml: attention_servers=", "must be the number"]),
        ("- prefetch\n", ["settings.yaml", "plugin", "list"]),
        ("prefetch: [1\n", ["cannot read", "settings.yaml"]),
        ("prefetch: !!python/object/apply:os.getcwd []\n", ["cannot read", "settings.yaml"]),
        ("prefetch: 2\nmetrics: all\nprefetch: 3\n", ["cannot read", "settings.yaml", "'prefetch' is given twice"]),
        ("debug:\n", ["settings.yaml: debug", "mapping", "NoneType"]),
        ("debug: {finite: on}\n", ["settings.yaml: debug", "'finite'", "Did you mean 'check_finite'?"]),
    ],
    ids=repr,
)
def test_section_that_is_wrong_is_refused_by_file_and_key(text: str, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Recipe.read(written(tmp_path, f"plugin:\n{textwrap.indent(text, '  ')}"))

    for part in parts:
        assert part in str(refused.value)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00prefetch")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        with pytest.raises(ConfigError, match="cannot read") as refused:
            read_yaml(path)
        assert str(path) in str(refused.value)


# --- agreement of ranks, and the launcher's environment


@pytest.mark.parametrize("name", NAMES)
def test_shared_settings_differ_when_a_setting_differs_that_ranks_must_share(name: str) -> None:
    same = made({name: OTHERS[name]}).shared_settings() == DistCAConfig().shared_settings()

    assert same == (name in ("prefetch", "plans_in_flight", "kernel_times", "metrics", "report_folder"))


@pytest.mark.parametrize("name", NAMES)
def test_shared_settings_are_equal_wherever_equal_settings_come_from(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explicit = made({name: OTHERS[name]}).shared_settings()
    of_recipe = from_recipe(written(tmp_path, in_yaml({name: OTHERS[name]})), monkeypatch).shared_settings()
    monkeypatch.setenv(variable_of(name), str(OTHERS[name]))

    assert explicit == of_recipe == DistCAConfig().shared_settings()


def test_shared_settings_are_equal_for_whole_seconds_however_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, decimal = (DistCAConfig(timeouts=Timeouts(exchange_seconds=seconds)) for seconds in (60, 60.0))
    assert whole == decimal

    monkeypatch.setenv("DISTCA_TIMEOUTS_EXCHANGE_SECONDS", "60")
    assert whole.shared_settings() == decimal.shared_settings() == DistCAConfig().shared_settings()


def test_unknown_environment_settings_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown_environment_settings() == {}
    for name in NAMES:
        monkeypatch.setenv(variable_of(name), str(OTHERS[name]))
    assert unknown_environment_settings() == {}

    for name in ("DISTCA_HOME", "DISTCA_KERNAL", "DISTCA_prefetch", "DISTCA_", "OTHER_KERNEL"):
        monkeypatch.setenv(name, "1")
    assert unknown_environment_settings() == {
        "DISTCA_": None,
        "DISTCA_HOME": None,
        "DISTCA_KERNAL": "DISTCA_KERNEL",
        "DISTCA_prefetch": "DISTCA_PREFETCH",
    }


@pytest.mark.parametrize(("given", "kept"), [(1, "1"), ("1", "1"), (0, "0"), ("0, 8", "0,8"), ("01", "1")])
def test_servers_are_a_number_or_one_for_each_node(
    given: int | str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal settings are equal texts, however they are written."""
    config = DistCAConfig(attention_servers=given)  # type: ignore[arg-type]

    monkeypatch.setenv(OF_RECIPE, "{}")
    assert config.attention_servers == kept
    assert dataclasses.replace(config, prefetch=3).attention_servers == kept
    recipe = Recipe.read(written(tmp_path, yaml.safe_dump({"plugin": {"attention_servers": given}})))
    recipe.prepare(os.environ)
    assert DistCAConfig().attention_servers == kept


def test_launched_servers_are_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_servers() == ()
    monkeypatch.setenv("DISTCA_LAUNCHED_SERVERS", "0,8")

    assert launched_servers() == (0, 8)
    assert unknown_environment_settings() == {}


LAUNCHED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_process_has_the_numbers_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)

    assert launched_process() == LaunchedProcess(5, 1, 8, 4, 1, 2)
    assert launched_nodes() == 2


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"])
def test_servers_need_the_store_of_a_launcher(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match="meet in the launcher's store, and this process has none: start it with"):
        launched_process()
    monkeypatch.setenv(missing, "False")
    with pytest.raises(ConfigError if missing.startswith("TORCH") else ValueError):
        launched_process()


def test_roles_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LAUNCHED | {"DISTCA_LAUNCHED_SERVERS": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="DISTCA_LAUNCHED_SERVERS=1: this process has its role already"):
        launched_process()


def test_the_plugin_warns_of_unknown_environment_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISTCA_TOKEN_PER_RANK", "4")
    DistCAPlugin()

    assert "ignoring environment variable DISTCA_TOKEN_PER_RANK: unknown setting of distca_hf" in caplog.text
    assert "did you mean DISTCA_TOKENS_PER_RANK?" in caplog.text
