"""The cells of a window; the twin of csrc/balance/plan.cpp."""

from __future__ import annotations

from dataclasses import replace

from sb_lightning.balance.reference.bounds import ddp_bound, fsdp_bound
from sb_lightning.balance.reference.cells import improve_ranks, improve_slots, loads_of
from sb_lightning.balance.reference.greedy import dealt_in_turns, largest_first, least_increase
from sb_lightning.balance.reference.karmarkar_karp import differencing, meet_least
from sb_lightning.balance.reference.packing import pack
from sb_lightning.balance.reference.problem import MOST_SEARCHED, NO_CAP, UNLIMITED, NoPacking, Parts, Problem
from sb_lightning.balance.reference.search import search_ranks, search_slots
from sb_lightning.balance.reference.slot_fill import fill_slots, one_full_slot
from sb_lightning.balance.reference.slots import by_load, even_ranks, line_up, polish
from sb_lightning.balance.reference.swaps import improve

__all__ = ["plan_ddp", "plan_fsdp"]

SEARCHED_ITEMS = 16
# Items times cells; beyond, fewer starts have to do.
ALL_STARTS_WORK = 1 << 18
# Shares of the bound. A large window is planned well enough with less than the first left to gain. With less
# than the second, most of the window in one micro-batch is not worth the memory.
WELL_ENOUGH, NOT_WORTH_ONE_SLOT = 1024, 128

Plan = tuple[list[Parts], bool]
"""`[rank][micro_batch]` = items, and whether no plan has a smaller value."""


def plan_ddp(problem: Problem, node_limit: int) -> Plan:
    """Deal items over cells so that the largest sum of a rank is small.

    Args:
        problem: The items and the limits.
        node_limit: Steps of the branch and bound, or `UNLIMITED`.

    Raises:
        NoPacking: No cells under the cap were found.
    """
    order = by_load(problem.costs)
    costs = [problem.costs[i] for i in order]
    bound = ddp_bound(problem)
    ranks, least, most = problem.ranks, problem.rank_least, problem.rank_most
    parts, value = _best_partition(costs, ranks, least, most, bound)
    rows = _pack_ranks(problem, order, parts)
    if rows is None:
        rows, value = _deal_cells(problem, _pack_all(problem), bound)
    finished = value <= bound
    if not finished and _is_searched(problem, node_limit):

        def fits(part: list[int]) -> bool | None:
            cells, certain = _pack_rank(problem, [order[i] for i in part])
            return None if cells is None and not certain else cells is not None

        capped = problem.max_tokens != NO_CAP and not problem.one_per_cell
        found, finished = search_ranks(
            costs, ranks, least, most, value, bound, node_limit, fits if capped else None
        )
        if found is not None:
            rows = _pack_ranks(problem, order, found) or rows
    return _ordered(problem, rows), finished


def plan_fsdp(problem: Problem, node_limit: int) -> Plan:
    """Deal items over cells so that the sum over slots of the slot's largest cell is small.

    Args:
        problem: The items and the limits.
        node_limit: Steps of the branch and bound, or `UNLIMITED`.

    Raises:
        NoPacking: No cells under the cap were found.
    """
    # The largest first, so that the order of the items decides nothing but which of equal ones goes where.
    order = sorted(range(len(problem.costs)), key=lambda i: (-problem.costs[i], -problem.tokens[i], i))
    ordered = replace(
        problem, costs=[problem.costs[i] for i in order], tokens=[problem.tokens[i] for i in order]
    )
    cells, finished = _fsdp_cells(ordered, node_limit)
    return _slots_to_rows(problem, [sorted(order[i] for i in cell) for cell in cells]), finished


def _fsdp_cells(problem: Problem, node_limit: int) -> tuple[Parts, bool]:
    """Return the cells of a problem whose costs descend, and whether no others have a smaller value."""
    size = len(problem.costs)
    if problem.one_per_cell:
        return [[i] for i in range(size)], True
    bound = fsdp_bound(problem)
    best: Parts = []
    best_value = -1
    is_large = size * problem.num_cells > ALL_STARTS_WORK
    for start in range(5):
        left = best_value - bound
        if best and (
            left <= (bound // WELL_ENOUGH if is_large else 0)
            or start == 4
            or (start == 2 and is_large)
            or (start == 3 and left <= bound // NOT_WORTH_ONE_SLOT)
        ):
            continue
        cells = _cells_from(problem, start)
        if cells is None:
            continue
        _level_slots(problem, cells)
        value = improve_slots(problem, cells, bound)
        if not best or value < best_value:
            best, best_value = cells, value
    finished = best_value <= bound
    if not finished and _is_searched(problem, node_limit):
        # Its steps are dearer than those of the other search, and win less.
        limit = node_limit if node_limit == UNLIMITED else node_limit // 4
        found, finished = search_slots(problem, best_value, bound, limit)
        best = found or best
    return best, finished


def _is_searched(problem: Problem, node_limit: int) -> bool:
    return len(problem.costs) <= (MOST_SEARCHED if node_limit == UNLIMITED else SEARCHED_ITEMS)


def _best_partition(costs: list[int], bins: int, least: int, most: int, bound: int) -> tuple[Parts, int]:
    """Return the best of three starts, each improved, and its largest sum."""
    best: Parts = []
    best_value = -1
    for start in range(3 if most == len(costs) else 2):
        if start == 0:
            parts = largest_first(costs, bins, least, most)
        elif start == 1:
            parts = differencing(costs, bins, bins)
        else:
            parts = differencing(costs, bins, 1)
            meet_least(costs, parts, least)
        value = improve(costs, parts, least, most, bound)
        if best_value < 0 or value < best_value:
            best, best_value = parts, value
        if best_value <= bound:
            break
    return best, best_value


def _pack_rank(problem: Problem, items: list[int]) -> tuple[Parts | None, bool]:
    if problem.one_per_cell:
        return [[i] for i in items], True
    limits = problem.cell_least, problem.cell_most, problem.max_tokens
    return pack(problem.tokens, sorted(items), problem.accumulate, *limits)


def _pack_ranks(problem: Problem, order: list[int], parts: Parts) -> list[Parts] | None:
    """Return the cells of each rank; None if a rank's items do not fit under the cap."""
    rows = []
    for part in parts:
        cells, _ = _pack_rank(problem, [order[place] for place in part])
        if cells is None:
            return None
        rows.append(cells)
    return rows


def _pack_all(problem: Problem) -> Parts:
    limits = problem.cell_least, problem.cell_most, problem.max_tokens
    cells, certain = pack(problem.tokens, list(range(len(problem.costs))), problem.num_cells, *limits)
    if cells is None:
        raise NoPacking(certain)
    return cells


def _deal_cells(problem: Problem, cells: Parts, bound: int) -> tuple[list[Parts], int]:
    """Deal whole cells to ranks, then exchange items between them; return the largest sum too."""
    loads = loads_of(problem, cells)
    order = by_load(loads)
    accumulate = problem.accumulate
    parts, _ = _best_partition([loads[c] for c in order], problem.ranks, accumulate, accumulate, bound)
    rows = [[order[i] for i in part] for part in parts]
    value = improve_ranks(problem, cells, rows, bound)
    return [[cells[c] for c in row] for row in rows], value


def _ordered(problem: Problem, rows: list[Parts]) -> list[Parts]:
    """Order the cells of each rank by descending cost; with one item per cell even the slots too."""
    if not problem.one_per_cell:
        return [[row[c] for c in by_load(loads_of(problem, row))] for row in rows]
    numbers = [[cell[0] for cell in row] for row in rows]
    line_up(problem.costs, numbers)
    polish(problem.costs, numbers)
    return [[[item] for item in row] for row in numbers]


def _level_slots(problem: Problem, cells: Parts) -> None:
    """Exchange items within each slot, where the cells then stay under the cap."""
    order = by_load(loads_of(problem, cells))
    for slot in range(problem.accumulate):
        chosen = order[slot * problem.ranks : (slot + 1) * problem.ranks]
        parts = [list(cells[cell]) for cell in chosen]
        mean = -(-sum(problem.costs[i] for part in parts for i in part) // problem.ranks)
        improve(problem.costs, parts, problem.cell_least, problem.cell_most, mean)
        if _under_cap(problem, parts):
            for cell, part in zip(chosen, parts, strict=True):
                cells[cell] = part


def _under_cap(problem: Problem, cells: Parts) -> bool:
    cap = problem.max_tokens
    return cap == NO_CAP or all(sum(problem.tokens[i] for i in cell) <= cap for cell in cells)


def _slots_to_rows(problem: Problem, cells: Parts) -> list[Parts]:
    """Deal cells to slots by descending cost, and to ranks so that their sums come close."""
    loads = loads_of(problem, cells)
    order = by_load(loads)
    ranks = problem.ranks
    slots = [order[s * ranks : (s + 1) * ranks] for s in range(problem.accumulate)]
    even_ranks(loads, slots)
    return [[cells[slot[rank]] for slot in slots] for rank in range(ranks)]


def _cells_from(problem: Problem, start: int) -> Parts | None:
    """Return the cells of one start, items ascending; None if they break the cap."""
    if start == 4:
        return _pack_all(problem)
    if start == 2:
        return least_increase(problem)
    if start == 3 and problem.equal_counts:
        return None
    cells = (fill_slots, dealt_in_turns, least_increase, one_full_slot)[start](problem)
    return cells if cells is not None and _under_cap(problem, cells) else None
