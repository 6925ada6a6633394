"""The job's rules, each broken on purpose: a history with known faults has to notice.

A mutant is a piece of the job's source, what stands in its place, and the run of a generated history (its stage) that
is not what was planted any more. The piece must occur exactly once in its module: who rewrites a rule is told to
rewrite its mutants. Only the function around it changes, in place, for as long as the mutant lives.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final


@dataclass(frozen=True)
class Mutant:
    """`stage`: which run of the history is wrong with it."""

    rule: str
    module: str
    old: str
    new: str
    stage: int = 1

    def __str__(self) -> str:
        return f"{self.rule}: spark/{self.module}.py: {' '.join(self.old.split())} → {' '.join(self.new.split())}"


@contextmanager
def alive(mutant: Mutant) -> Iterator[None]:
    """The job with this mutant in it."""
    module = importlib.import_module(f"spark.{mutant.module}")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    count = source.count(mutant.old)
    assert count == 1, f"occurs {count} times, has to occur once: rewrite it with its rule. {mutant}"
    changed = source.replace(mutant.old, mutant.new)
    fresh: dict[str, Any] = dict(vars(module))
    exec(compile(changed, str(module.__file__), "exec"), fresh)
    where = source[: source.index(mutant.old)].count("\n") + 1
    name = _owner(ast.parse(source), where)
    if name is None:
        yield from _constant(module, fresh, ast.parse(source), where)
        return
    there, new = _function(vars(module), name), _function(fresh, name)
    whole = there.__code__
    assert whole != new.__code__, f"changes nothing: {mutant}"
    there.__code__ = new.__code__
    try:
        yield
    finally:
        there.__code__ = whole


def _owner(tree: ast.Module, line: int) -> str | None:
    """Qualified name of the function of a module, or of one of its classes, in which a line stands."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for one in inner:
            if isinstance(one, ast.FunctionDef) and one.lineno <= line <= (one.end_lineno or 0):
                return one.name if one is node else f"{getattr(node, 'name', '')}.{one.name}"
    return None


def _function(names: dict[str, Any], name: str) -> FunctionType:
    """A function, a method, or what a property or a class method is made of."""
    owner, _, last = name.rpartition(".")
    found: Any = vars(names[owner])[last] if owner else names[last]
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    assert isinstance(found, FunctionType), name
    return found


def _constant(module: ModuleType, fresh: dict[str, Any], tree: ast.Module, line: int) -> Iterator[None]:
    """Put a changed constant wherever the job's modules hold it."""
    node = next(node for node in tree.body if node.lineno <= line <= (node.end_lineno or 0))
    assert isinstance(node, ast.AnnAssign)
    assert isinstance(node.target, ast.Name)
    name = node.target.id
    whole = vars(module)[name]
    holders = [
        one for path, one in list(sys.modules.items()) if path.startswith("spark.") and vars(one).get(name) is whole
    ]
    for holder in holders:
        setattr(holder, name, fresh[name])
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, name, whole)


_CAUSE: Final = "cause of a copy"
_ORDER: Final = "order of copies"
_LOST: Final = "proof of lost"
_GAP: Final = "evidence gap"
_PHANTOM: Final = "phantom"
_STUCK: Final = "stuck"
_CONFLICT: Final = "conflict"
_CLIENT: Final = "client duplicate"
_BALANCE: Final = "balance"
_GRACE: Final = "grace"
_WINDOW: Final = "window"
_STATE: Final = "one row an id"
_READ: Final = "what a record is"

MUTANTS: Final = (
    # ------------------------------------------------------------------------------------------ order and causes
    Mutant(_ORDER, "causes", 'F.when(pair["entered"], 0).otherwise(1)', 'F.when(pair["entered"], 1).otherwise(0)'),
    Mutant(
        _ORDER,
        "causes",
        '= ("timestamp", "topic", "partition", "offset",',
        '= ("topic", "partition", "timestamp", "offset",',
    ),
    Mutant(
        _ORDER,
        "causes",
        '= ("timestamp", "topic", "partition", "offset",',
        '= ("timestamp", "topic", "offset", "partition",',
    ),
    Mutant(_CAUSE, "causes", '~copy["stamped"] | (same_producer & (copy["late"] == 1))', '~copy["stamped"]'),
    Mutant(_CAUSE, "causes", '~copy["stamped"] | (same_producer', "(same_producer"),
    Mutant(_CAUSE, "causes", '(same_producer & (copy["late"] == 1))', "same_producer"),
    Mutant(_CAUSE, "causes", 'same(other, "slot", "pid", "epoch", "instance")', 'same(other, "slot", "pid", "epoch")'),
    Mutant(_CAUSE, "causes", 'same(other, "slot", "pid", "epoch", "instance")', 'same(other, "slot", "instance")'),
    Mutant(_CAUSE, "causes", ".when(same_producer, REWRITE)", ".when(same_producer, PRODUCER_RESTART)"),
    Mutant(_CAUSE, "causes", ">= key_ttl_ms", "> key_ttl_ms"),
    Mutant(_CAUSE, "causes", ">= key_ttl_ms", ">= key_ttl_ms - 1"),
    Mutant(_CAUSE, "causes", "apart = F.forall(", "apart = F.exists("),
    Mutant(_CAUSE, "causes", "(F.size(ours) > 0) & apart", "apart"),
    Mutant(_CAUSE, "causes", '(same(other, "slot") | same(other, "instance"))', 'same(other, "slot")'),
    Mutant(_CAUSE, "causes", '(same(other, "slot") | same(other, "instance"))', 'same(other, "instance")'),
    Mutant(_CAUSE, "causes", ' & ~same(other, "pid", "epoch")', ""),
    Mutant(_CAUSE, "causes", ".otherwise(DUAL_PRODUCER)", ".otherwise(PRODUCER_RESTART)"),
    Mutant(_CAUSE, "causes", "F.when(nth > 0, _cause", "F.when(nth >= 0, _cause"),
    # ------------------------------------------------------------------------------------------------------ lost
    Mutant(_GRACE, "verdict", "accepted_ms + self.settle_ms", "accepted_ms + self.settle_ms + 2"),
    Mutant(_GRACE, "verdict", "seen_ms + self.grace_ms", "seen_ms + self.grace_ms + 2"),
    Mutant(_GRACE, "verdict", "seen_ms + self.grace_ms", "seen_ms"),
    Mutant(_GRACE, "settings", "self.shared.request_timeout_ms + self.shared", "self.shared"),
    Mutant(_GRACE, "settings", " + self.grace_ms", ""),
    Mutant(_GRACE, "settings", "+ self.shared.transaction_timeout_ms", ""),
    Mutant(_LOST, "verdict", "over_ms < seen.frozen_ms", "over_ms <= seen.frozen_ms"),
    Mutant(_LOST, "verdict", ".when(~ripe, PENDING)", ".when(F.lit(False), PENDING)"),
    Mutant(_LOST, "verdict", ".when(beyond & unsettled, PENDING)", ".when(F.lit(False), PENDING)"),
    Mutant(_LOST, "verdict", 'claim["offset"] >= bound["end"]', 'claim["offset"] > bound["end"]'),
    Mutant(_LOST, "verdict", "beyond & unsettled", "unsettled"),
    Mutant(_LOST, "offsets", "self.end == self.last_stable >= self.high_watermark", "self.end == self.last_stable"),
    Mutant(_LOST, "verdict", '~F.exists("entries", lambda entry: state.same_place(answer, entry))', "F.lit(True)"),
    Mutant(
        _LOST,
        "verdict",
        'F.concat(claims("entries", "ledger"), claims(unentered, "answer"))',
        'claims("entries", "ledger")',
    ),
    Mutant(
        _LOST,
        "verdict",
        'F.concat(claims("entries", "ledger"), claims(unentered, "answer"))',
        'claims(unentered, "answer")',
    ),
    # ------------------------------------------------------------------------------------------------------ gaps
    Mutant(_GAP, "verdict", 'claim["offset"] < bound["first"]', 'claim["offset"] <= bound["first"]'),
    Mutant(_GAP, "verdict", '.when(claim["offset"] < bound["first"], "below_start")', ""),
    Mutant(_GAP, "verdict", '(claim["offset"] >= gap["first"])', '(claim["offset"] > gap["first"])', 2),
    Mutant(_GAP, "verdict", '(claim["offset"] < gap["last"])', '(claim["offset"] <= gap["last"])', 2),
    Mutant(_GAP, "verdict", '.when(claim["seen_ms"] < bound["since_ms"], "recreated")', "", 2),
    Mutant(_GAP, "verdict", '.when(bound["compacted"] & ~beyond, "compacted")', ""),
    Mutant(_GAP, "verdict", 'bound["compacted"] & ~beyond', 'bound["compacted"]'),
    Mutant(_GAP, "verdict", 'F.when(ripe, "topic_gone").otherwise(PENDING)', 'F.lit("topic_gone")'),
    Mutant(_GAP, "offsets", "if last.life != topic.life:", "if False:", 2),
    Mutant(_GAP, "offsets", "if ends.log_start > last.end:", "if False:", 2),
    Mutant(_GAP, "findings", 'F.when(claim["fate"].isin(RETENTION, TRUNCATED), 0).otherwise(1)', "F.lit(1)", 2),
    Mutant(_GAP, "offsets", "complete_ms=stamps.get(log.place, now_ms)", "complete_ms=0"),
    # --------------------------------------------------------------------------------------------------- phantoms
    Mutant(_PHANTOM, "verdict", "F.when(over_ms > decided_ms, PENDING)", "F.when(over_ms >= decided_ms, PENDING)"),
    Mutant(_PHANTOM, "verdict", "F.when(over_ms > decided_ms, PENDING)", "F.when(F.lit(False), PENDING)"),
    Mutant(
        _PHANTOM, "verdict", "F.greatest(accepted_ms, seen_ms) + self.settle_ms", "F.greatest(accepted_ms, seen_ms)"
    ),
    Mutant(_PHANTOM, "verdict", "seen.held_over_ms(*times)).otherwise", "seen.over_ms(*times)).otherwise"),
    Mutant(_PHANTOM, "verdict", "(complete_ms > first[", "(complete_ms < first["),
    Mutant(
        _PHANTOM,
        "verdict",
        '.when(complete_ms.isNull() | (complete_ms > first["accepted_at"]), "evidence_gap")',
        "",
    ),
    Mutant(_PHANTOM, "verdict", "complete_ms.isNull() | (complete_ms", "(complete_ms"),
    Mutant(_PHANTOM, "verdict", '> first["accepted_at"]), "evidence_gap")', '> first["timestamp"]), "evidence_gap")'),
    Mutant(_PHANTOM, "verdict", "~(idempotent & answered)", "~idempotent"),
    Mutant(_PHANTOM, "verdict", " & ~(idempotent & answered)", ""),
    Mutant(_PHANTOM, "verdict", '"answered_504", "answered_other") > 0', '"answered_other") > 0'),
    # ------------------------------------------------------------------------------------------------------ stuck
    Mutant(
        _STUCK, "verdict", ".when(unsure_over_ms > decided_ms, PENDING)", ".when(unsure_over_ms >= decided_ms, PENDING)"
    ),
    Mutant(_STUCK, "verdict", ".when(unsure_over_ms > decided_ms, PENDING)", ""),
    Mutant(_STUCK, "verdict", "min(seen.ledger_decided_ms, seen.answers_decided_ms)", "seen.answers_decided_ms"),
    Mutant(_STUCK, "verdict", "(seen.held_over_ms if decided_ms < seen.frozen_ms else seen.over_ms)", "seen.over_ms"),
    Mutant(_STUCK, "findings", 'F.when(F.col("answered_504") > 0, "504")', 'F.when(F.col("answered_202") > 0, "504")'),
    Mutant(_BALANCE, "verdict", "(unsure & ~taken_back)", "unsure"),
    Mutant(_BALANCE, "verdict", '_sum("answered_202", "answered_504") > 0', '_sum("answered_504") > 0'),
    Mutant(_BALANCE, "verdict", '_sum("answered_202", "answered_504") > 0', '_sum("answered_202") > 0'),
    Mutant(_BALANCE, "verdict", '_sum("entries_count", "answered_201") > 0', '_sum("answered_201") > 0'),
    # --------------------------------------------------------------------------------------------------- conflicts
    Mutant(_CONFLICT, "verdict", 'F.array_contains(known, one["alt"])', "F.lit(False)"),
    Mutant(_CONFLICT, "verdict", 'F.array_contains(known, one["alt"])', "F.lit(True)"),
    Mutant(_CONFLICT, "findings", 'F.when(F.col("conflicting"), CONFLICT).otherwise(DUPLICATE)', "F.lit(DUPLICATE)"),
    Mutant(_BALANCE, "verdict", '.when(F.col("conflicting"), "conflicted")', ""),
    Mutant(_BALANCE, "verdict", '.when(F.col("count") > 1, "duplicated")', '.when(F.col("count") > 2, "duplicated")'),
    Mutant(_BALANCE, "verdict", '.when(unproven, "unprovable")', ""),
    Mutant(_BALANCE, "verdict", ".when(some(LOST), LOST)", ""),
    Mutant(_BALANCE, "verdict", '(F.col("count") == 1) & ours', 'F.col("count") == 1'),
    Mutant(_BALANCE, "verdict", '(F.col("stamped") == 0)', '(F.col("count") == 0)'),
    # ------------------------------------------------------------------------------------------ client duplicates
    Mutant(_CLIENT, "ids", "distance < seen.key_ttl_ms", "distance <= seen.key_ttl_ms"),
    Mutant(_CLIENT, "ids", "distance < seen.key_ttl_ms", "distance < seen.key_ttl_ms - 1"),
    # --------------------------------------------------------------------------------------- balance, window, time
    Mutant(_WINDOW, "report", "settings.options.window_h * HOUR_MS", "settings.options.window_h * HOUR_MS * 2"),
    Mutant(_WINDOW, "report", "settings.options.window_h * HOUR_MS", "(settings.options.window_h - 1) * HOUR_MS"),
    Mutant(_WINDOW, "state", '_arrived_ms(arrived or {}), "last_ts"', '"last_ts"', 2),
    Mutant(_BALANCE, "balance", "_add(self.adjustment, apart, -1)", "pass"),
    Mutant(_BALANCE, "balance", "_add(self.adjustment, together, 1)", "pass"),
    Mutant(_BALANCE, "balance", 'if any(counts.get("open") for counts in topics.values())', "if not topics", 3),
    # ---------------------------------------------------------------------------------------- rows, and what is read
    Mutant(
        _READ,
        "decode",
        '~header["key"].isin(wire.KEY_HEADER, wire.STAMP_HEADER, wire.TRACE_HEADER)',
        '~header["key"].isin(wire.KEY_HEADER, wire.STAMP_HEADER)',
    ),
)


def by_stage(mutants: tuple[Mutant, ...]) -> dict[int, list[Mutant]]:
    """The mutants of each stage, in order."""
    return {stage: [one for one in mutants if one.stage == stage] for stage in (1, 2, 3)}
