"""Tests each rule by leaving it out: the search must find the violation by the shortest trace."""

import pytest

from tests.model.configurations import MUTANTS, REDUNDANT
from tests.model.rules import Rules
from tests.model.search import search

EVERY: frozenset[str] = frozenset(Rules._fields)


def without(rule: str) -> Rules:
    """All rules but one."""
    assert rule in EVERY
    return Rules()._replace(**{rule: False})


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_rule_the_search_finds_what_goes_wrong(name: str) -> None:
    mutant = MUTANTS[name]
    result = search(mutant.configuration, without(mutant.rule))
    print(f"without {mutant.rule}, {name}: {result}")  # noqa: T201 - the trace, under -s
    assert result.violation == mutant.violation, str(result)
    assert len(result.trace) <= mutant.steps, str(result)


@pytest.mark.parametrize("name", {mutant.configuration: name for name, mutant in MUTANTS.items()}.values())
def test_with_the_rule_the_same_faults_do_no_harm(name: str) -> None:
    result = search(MUTANTS[name].configuration)
    assert not result.violation, str(result)


@pytest.mark.parametrize("rule", REDUNDANT)
def test_a_rule_that_others_cover(rule: str) -> None:
    _, configuration = REDUNDANT[rule]
    result = search(configuration, without(rule))
    assert not result.violation, str(result)


def test_every_rule_is_taken_out() -> None:
    assert {mutant.rule for mutant in MUTANTS.values()} | set(REDUNDANT) == EVERY
