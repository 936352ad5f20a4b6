"""Mutants: deliberate bugs of a few lines each, which a fault class or a test must detect.

`catalogue.toml` lists the bugs. Each entry names the class that must find it, and settings with which that
class finds it within seconds. A copy of the program is changed and given to the class. A mutant that is not
detected is a finding.

With `control`, every class first judges an unchanged copy with the same settings and must find nothing. A
class that always complains would prove nothing.

Settings: `choose`: number of mutants, 0 for all, otherwise a different selection for each commit; `control`.
"""

from __future__ import annotations

import time

from chaos.mutants.catalogue import Mutant, load_catalogue
from chaos.mutants.trial import Trial, try_mutant, try_unchanged
from chaos.order import Account, Order
from chaos.run import commit_of

SETTINGS = {"choose": 0, "control": False}


def run(order: Order, account: Account) -> None:
    """Try the selected mutants in order, as many as fit into the time."""
    settings = order.choose(SETTINGS)
    mutants = list(load_catalogue())
    until = time.monotonic() + order.seconds
    if settings["choose"]:
        order.random(commit_of()).shuffle(mutants)
        mutants = mutants[: settings["choose"]]
    if settings["control"]:
        _control(mutants, order, account)
    for mutant in mutants:
        if time.monotonic() > until:
            account.skip(f"mutant {mutant.number}", "no time left for this class")
            continue
        _judge(mutant, try_mutant(mutant, order.scratch, order.seed), account)


def replay(order: Order, case: str) -> None:
    """Try one mutant by its number. Raises AssertionError if it is not detected."""
    mutant = next(each for each in load_catalogue() if str(each.number) == case)
    trial = try_mutant(mutant, order.scratch, order.seed)
    print(trial.output)
    print(f"{mutant.judge} noticed: {trial.noticed or 'nothing'} ({trial.seconds:.1f} s)")
    assert trial.noticed, _survival(mutant, trial)


def _judge(mutant: Mutant, trial: Trial, account: Account) -> None:
    if trial.skipped:
        account.skip(f"mutant {mutant.number}", trial.skipped)
        return
    account.count_work("mutants")
    if trial.noticed:
        account.count_work("caught")
        account.figures[f"mutant_{mutant.number:02}_s"] = round(trial.seconds, 1)
    else:
        story = f"{mutant.file}\n- {mutant.old}\n+ {mutant.new}\n{trial.output}"
        account.report_finding(_survival(mutant, trial), str(mutant.number), story)


def _survival(mutant: Mutant, trial: Trial) -> str:
    """Return the text of a finding: no bug was found, or no finding contains the required text."""
    if trial.other:
        return (
            f"mutant {mutant.number} ({mutant.what}): {mutant.judge} does not say {mutant.says!r} but "
            f"{trial.other!r}"
        )
    return f"mutant {mutant.number} survived {mutant.judge}: {mutant.what}"


def _control(mutants: list[Mutant], order: Order, account: Account) -> None:
    tried: list[tuple[object, ...]] = []
    for mutant in mutants:
        if mutant.trial_key() in tried:
            continue
        tried.append(mutant.trial_key())
        trial = try_unchanged(mutant, order.scratch, order.seed)
        if trial.noticed and not trial.skipped:
            account.report_finding(
                f"{mutant.judge} complains about the unchanged program, as set for mutant {mutant.number}",
                str(mutant.number),
                f"{trial.noticed}\n{trial.output}",
            )
        account.count_work("controls")
