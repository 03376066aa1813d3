"""FUSED_SLOTS_* variables: defaults, spelling, refusals, and that they are read late."""

from __future__ import annotations

import pytest

from fused_slots import AscendBlockTables, KVCacheGroup, env
from fused_slots.faults import ConfigurationError


def build() -> AscendBlockTables:
    return AscendBlockTables.from_groups(
        [KVCacheGroup(16, 8)], max_num_reqs=2, max_num_batched_tokens=4
    )


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_every_variable_has_a_valid_default_and_a_meaning(variable: env.Variable) -> None:
    assert variable.name.startswith("FUSED_SLOTS_")
    assert variable.read() == variable.default
    assert variable.default in variable.choices
    assert variable.meaning


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_every_choice_is_read_whatever_its_spelling(
    variable: env.Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in variable.choices:
        monkeypatch.setenv(variable.name, f" {choice.upper()} ")
        assert variable.read() == choice


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
@pytest.mark.parametrize("value", ["2", "yes", "maybe", "cpu,cuda"])
def test_unknown_values_are_refused_and_the_choices_named(
    variable: env.Variable, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, value)
    if variable.text or (variable.number and value.isdecimal()):
        assert variable.read() == value
        return
    with pytest.raises(ConfigurationError) as raised:
        variable.read()
    assert raised.value.argument == variable.name
    assert raised.value.actual == repr(value)
    for choice in filter(None, variable.choices):
        assert choice in raised.value.expected


def test_variables_are_listed_once() -> None:
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    assert {variable for variable in vars(env).values() if isinstance(variable, env.Variable)} == {
        *env.VARIABLES
    }


@pytest.mark.parametrize("name", ["FUSED_SLOTS_BACKEND", "FUSED_SLOTS_CHECKED"])
def test_a_manager_refuses_an_unknown_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ConfigurationError, match=f"{name}.*got 'maybe'"):
        build()


def test_checked_is_read_at_construction_and_an_argument_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not build()._backend.checked
    monkeypatch.setenv("FUSED_SLOTS_CHECKED", "1")
    assert env.checked()
    assert build()._backend.checked
    unchecked = AscendBlockTables.from_groups(
        [KVCacheGroup(16, 8)], max_num_reqs=2, max_num_batched_tokens=4, checked=False
    )
    assert not unchecked._backend.checked


def test_backend_is_read_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_BACKEND", "CPU")
    assert build()._backend.name == "cpu"


def test_the_null_block_is_read_at_construction_and_an_argument_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert build().layout.null_block_id is None
    monkeypatch.setenv("FUSED_SLOTS_NULL_BLOCK", "3")
    assert build().layout.null_block_id == 3
    given = AscendBlockTables.from_groups(
        [KVCacheGroup(16, 8)], max_num_reqs=2, max_num_batched_tokens=4, null_block_id=0
    )
    assert given.layout.null_block_id == 0
