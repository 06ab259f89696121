"""Write a study's winner, or another of its trials, to an allocation.json: `search.export`."""

from __future__ import annotations

from pathlib import Path

import click

from search.console.cli import Command, Whole, option, study_options, user_errors


@click.command(cls=Command)
@option("Export", "--study", required=True, metavar="NAME", help="Name of the study.")
@option(
    "Export",
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; an older one is replaced.",
)
@option(
    "Export",
    "--trial",
    type=Whole(min=0),
    metavar="N",
    help="Number of a complete trial.  [default: the winner]",
)
@study_options
def main(study: str, out: Path, trial: int | None, root: Path, storage: str | None) -> None:
    """Write a study's winner as a file that `python -m search.retrain` reads.

    The file holds the number of experts of each layer, the adapter's settings, how the allocation
    was measured, and the same as arguments of the reference implementation.
    """
    with user_errors():
        from studies.export import allocation_document
        from studies.files import write_json_atomic
        from studies.store import load_study, storage_url

        document = allocation_document(load_study(study, storage_url(root, study, storage)), trial)
        write_json_atomic(out, document)
    click.echo(f"wrote trial {document['study']['trial']} of {study} to {out}")


if __name__ == "__main__":
    main()
