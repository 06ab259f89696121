"""Say how to repeat a study: commands, settings, seeds, versions, machine, fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from search.console.command_line import module_command, study_place
from search.priors.given import Prior
from search.report.findings import Findings
from search.report.parts import Section, Table


def origin(
    findings: Findings, root: Path, storage: str | None, taken: Sequence[Prior] = ()
) -> Section:
    """Give the section that lets others repeat the search.

    Args:
        findings: The study.
        root: Folder of the studies.
        storage: URL, if it is not the default one; passwords are masked.
        taken: What the search began with from other ones.
    """
    spec = findings.spec
    train, adapter = spec.train, spec.adapter
    rows = [
        ("study", findings.name),
        ("model", f"{spec.model_name}" + _revision(spec.model.revision)),
        ("model's fingerprint", spec.model_fingerprint),
        ("dtype of the frozen weights", spec.model.dtype),
        ("data", spec.data),
        ("data's fingerprint", spec.data_fingerprint),
        ("prompt template", spec.prompt_template or "the default"),
        ("longest row", f"{spec.max_length} tokens"),
        ("budget", f"{spec.total} experts over {spec.num_layers} layers"),
        ("experts in a layer", f"{spec.low} to {spec.high}"),
        ("target modules", ", ".join(adapter.target_modules or ()) or "all linear layers"),
        (
            "expert",
            f"rank {adapter.r}, lora_alpha {adapter.lora_alpha:g}, dropout "
            f"{adapter.lora_dropout:g}, top_k {adapter.top_k}, balance loss "
            f"{adapter.router_aux_loss_coef:g}",
        ),
        (
            "a trial",
            f"{train.steps} steps of {train.batch_size} rows, peak learning rate "
            f"{train.learning_rate:g}, warm-up {train.warmup} steps",
        ),
        ("evaluated on the way at steps", ", ".join(map(str, spec.rungs)) or "none"),
        ("seed of the search", str(spec.seed)),
        ("seeds of all trials", ", ".join(map(str, sorted({t.seed for t in findings.trials})))),
    ]
    rows += [("began with", str(prior.source)) for prior in taken]
    if findings.runs:
        latest = findings.runs[-1]
        rows += [
            ("rows", f"{latest.train_rows} to train, {latest.validation_rows} to validate"),
            *latest.machine.items(),
            *((f"version of {name}", number) for name, number in latest.versions.items()),
        ]
    place = ["--study", findings.name, *study_place(root, storage)]
    commands = list(dict.fromkeys(run.command for run in findings.runs))
    commands += [
        module_command("export", *place, "--out", "winner.json"),
        module_command("report", *place),
    ]
    text = ["The settings that make it this study and no other:"]
    if findings.runs:
        text = [
            f"First run: {findings.runs[0].began}. Commands that ran trials, the first one first, "
            "are below, followed by those that write the winner and this report. Machine and "
            "versions are those of the latest."
        ]
    return Section(
        "To repeat it",
        tuple(text),
        tables=(Table(("what", "value"), tuple(rows), left=2),),
        code=tuple(commands),
    )


def _revision(revision: str | None) -> str:
    return "" if revision is None else f", revision {revision}"
