"""A plan's points proposed by Optuna instead of laid out as a grid.

Every algorithm gets the same number of trials. Points come in batches of a fixed size, each knowing
the results before it, and nothing is remembered but the runs' folders: an interrupted search asks
for the same points again, finds their runs finished, and goes on.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .execute import Event, Outcome, execute
from .grid import best_points
from .plan import Entry, Plan, PlanError, Range, Run, Search
from .runs import read_runs

__all__ = ["execute_search", "propose"]


def propose(
    entry: Entry,
    search: Search,
    results: Sequence[tuple[dict[str, Any], float | None]],
    count: int,
    *,
    maximise: bool = True,
    salt: str = "",
) -> list[dict[str, Any]]:
    """The next points of one algorithm; the same ones for the same results.

    Args:
        entry: The algorithm, with the ranges to search.
        search: How.
        results: The points so far and the value of each; None for one that failed.
        count: How many to propose.
        maximise: Whether more is better.
        salt: Told apart from other searches with the same seed by this, such as the experiment.

    Raises:
        PlanError: If Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise PlanError(
            "a search needs Optuna: pip install 'fedmuon_pl[optuna]', or give a grid"
        ) from None

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, Any] = {
        key: optuna.distributions.CategoricalDistribution(space.choices)
        if space.choices
        else optuna.distributions.FloatDistribution(space.low, space.high, log=space.log)
        for key, space in entry.search.items()
    }
    # A new sampler for each batch, whose draws depend on what was asked before by its number only.
    seed = zlib.crc32(f"{search.seed} {salt} {entry.label} {len(results)}".encode())
    if search.sampler == "random":
        sampler: Any = optuna.samplers.RandomSampler(seed=seed)
    else:
        # Points of one batch do not know each other's results: the liar keeps them apart.
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=max(search.batch, search.trials // 3), constant_liar=True
        )
    study = optuna.create_study(direction="maximize" if maximise else "minimize", sampler=sampler)
    states = optuna.trial.TrialState
    for point, value in results:
        study.add_trial(
            optuna.trial.create_trial(
                params=dict(point),
                distributions=distributions,
                value=value,
                state=states.FAIL if value is None else states.COMPLETE,
            )
        )
    points = []
    for _ in range(count):
        trial = study.ask(distributions)
        points.append(
            {key: _short(trial.params[key], space) for key, space in entry.search.items()}
        )
    return points


def _short(value: Any, space: Range) -> Any:  # noqa: ANN401
    """Four digits make a readable folder, and are what the run gets."""
    if space.choices:
        return value
    return min(max(float(f"{value:.4g}"), space.low), space.high)


def execute_search(
    plan: Plan,
    root: str | Path | None = None,
    jobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_batch: Callable[[list[Run]], None] = lambda runs: None,
    *,
    poll: float = 0.2,
) -> list[Outcome]:
    """Does a plan whose algorithms are searched, batch after batch.

    Args:
        plan: The plan; algorithms without a search run as they are.
        root: As of :func:`~fedmuon_pl.compare.execute.execute`.
        jobs: As there.
        on_event: As there.
        on_batch: Called with the runs of each batch before they start.
        poll: As there.

    Returns:
        One outcome a run, of all batches; after Ctrl-C those so far.
    """
    search = plan.search
    if search is None:
        raise PlanError(f"plan {plan.name} has no search")
    everything: list[Outcome] = []
    for experiment in plan.experiments:
        entries: Sequence[Entry] = plan.entries
        outcomes: dict[str, Outcome] = {}
        for start in range(0, search.trials, search.batch):
            count = min(search.batch, search.trials - start)
            entries = _next(plan, entries, experiment, outcomes, search, count)
            part = dataclasses.replace(plan, experiments=[experiment], entries=entries)
            known = set(outcomes)
            ahead = [run for run in part.runs(root) if run.name not in known]
            on_batch(ahead)
            names = [run.name for run in ahead]
            batch = execute(part, root, jobs, on_event, only=names, poll=poll)
            outcomes |= {outcome.run.name: outcome for outcome in batch}
            if any(outcome.status in ("stopped", "waiting") for outcome in batch):
                return [*everything, *outcomes.values()]
        everything += outcomes.values()
    return everything


def _next(
    plan: Plan,
    entries: Sequence[Entry],
    experiment: str,
    outcomes: dict[str, Outcome],
    search: Search,
    count: int,
) -> list[Entry]:
    """The entries with a batch of points more."""
    done = [o.run for o in outcomes.values()]
    data, _ = read_runs(o.run.folder for o in outcomes.values() if o.status in ("done", "skipped"))
    found = {result.algorithm: result for result in best_points(done, data, plan.choose)}
    grown = []
    for entry in entries:
        if not entry.search:
            grown.append(entry)
            continue
        trials = found[entry.label].trials if entry.label in found else ()
        results = [(dict(trial.point), trial.score) for trial in trials]
        maximise = plan.choose.mode == "max"
        points = propose(entry, search, results, count, maximise=maximise, salt=experiment)
        proposed = list(entry.proposed)
        for point in points:
            if point not in proposed:
                proposed.append(point)
        grown.append(dataclasses.replace(entry, proposed=proposed))
    return grown
