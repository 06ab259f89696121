"""Write a study's winner, or another of its trials, for retraining or other programs."""

from __future__ import annotations

from pathlib import Path

import click

from search.console.cli import Command, Whole, option, study_options, user_errors

FORMATS = ("json", "yaml", "python", "upstream", "peft")  # search.formats' list


@click.command(cls=Command)
@option("Export", "--study", required=True, metavar="NAME", help="Name of the study.")
@option(
    "Export",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="File to write, or folder of peft; an older file is replaced.",
)
@option(
    "Export",
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="json",
    help="json: what search.retrain reads; yaml: the same as YAML; python: a program that attaches "
    "the adapter; upstream: arguments of the reference implementation; peft: a folder with the "
    "adapter_config.json of an adapter that is not trained yet.",
)
@option(
    "Export",
    "--trial",
    type=Whole(min=0),
    metavar="N",
    help="Number of a complete trial.  [default: the winner]",
)
@study_options
def main(
    study: str, out: Path, form: str, trial: int | None, root: Path, storage: str | None
) -> None:
    """Write a study's winner as a file that `python -m search.retrain` reads, or in another form.

    The file holds the number of experts of each layer, the adapter's settings, how the allocation
    was measured, and the same as arguments of the reference implementation.
    """
    with user_errors():
        from search.formats import write
        from studies.export import allocation_document
        from studies.store import load_study, storage_url

        document = allocation_document(load_study(study, storage_url(root, study, storage)), trial)
        write(document, form, out)
    click.echo(f"wrote trial {document['study']['trial']} of {study} to {out}")


if __name__ == "__main__":
    main()
