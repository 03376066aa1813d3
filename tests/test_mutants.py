"""The mutants still fit the sources; tests/mutants.py shows that each of them is noticed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutant_list import MUTANTS, TESTS, Mutant
from tests.mutants import ROOT, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.set}: {mutant.name}")
def test_a_mutant_changes_one_place_of_its_file(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutated(text, mutant) != text


def test_mutants_have_names_of_their_own_and_tests_to_run() -> None:
    names = Counter((mutant.set, mutant.name) for mutant in MUTANTS)
    assert max(names.values()) == 1
    assert {mutant.set for mutant in MUTANTS} == set(TESTS)
    assert min(Counter(mutant.set for mutant in MUTANTS).values()) >= 30


@pytest.mark.parametrize("old", ["nowhere", "a"])
def test_a_mutant_that_fits_nowhere_or_twice_is_refused(old: str) -> None:
    with pytest.raises(SystemExit, match="not once"):
        mutated("a = a", Mutant("host", "stale", "file.py", old, "b"))
