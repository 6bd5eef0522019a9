"""Why the overlay cannot be applied to a site: every reason, each with a way out."""

from __future__ import annotations

from patcher import diff, record
from patcher.errors import Fault, Refused
from patcher.receipt import PACKAGE
from patcher.site import Site
from patcher.state import Survey
from patcher.states import FileState, TreeState


def find(survey: Survey, *, allow_downgrade: bool) -> list[Fault]:
    """Return every reason why the overlay cannot be applied to the surveyed site."""
    site = survey.site
    if survey.state is TreeState.ABSENT:
        return [absent(site)]
    faults = _distribution_faults(survey)
    if survey.state is TreeState.FOREIGN:
        faults += [_unknown_release(survey), *_clashes(survey)]
    if survey.state is TreeState.NEWER and not allow_downgrade:
        assert survey.receipt is not None
        faults.append(
            Fault(
                code="overlay-newer",
                message=f"overlay {survey.receipt.overlay_version} is installed and newer than "
                f"this one, {survey.source.version}",
                path=str(site.root / PACKAGE),
                hint="Use that version, or add --allow-downgrade to go back on purpose.",
            )
        )
    faults += _folder_faults(survey)
    faults += [
        Fault(
            code="overlay-modified",
            message="is in the way: not as any overlay put it there",
            path=report.path,
            hint="Move the file away if it is yours, then run this again.",
        )
        for report in survey.overlay
        if report.state is FileState.FOREIGN
    ]
    if survey.receipt is None:
        faults += [
            Fault(
                code="receipt-missing",
                message="is patched already, but there is no receipt of it",
                path=report.path,
                hint=site.reinstall,
            )
            for report in survey.files
            if report.state is FileState.PATCHED
        ]
    return faults


def absent(site: Site) -> Fault:
    """Return the fault that there is no SGLang in ``site``."""
    return Fault(
        code="sglang-missing",
        message="holds no sglang package",
        path=str(site.root),
        hint="Install a supported release first, or pass another --target.",
    )


def _distribution_faults(survey: Survey) -> list[Fault]:
    """Refuse forks under another name, and versions that their own content contradicts."""
    site = survey.site
    if site.dist_info is None:
        owner = _owner(site)
        if owner is None:
            return [
                Fault(
                    code="metadata-missing",
                    message="holds an sglang package but no metadata of an installed sglang: "
                    "whoever imports the package may not find the overlay here",
                    path=str(site.root),
                    hint=site.metadata_hint,
                )
            ]
        return [
            Fault(
                code="foreign-distribution",
                message=f"the sglang package here belongs to the distribution {owner}",
                path=str(site.root / "sglang"),
                hint="Only the distribution named sglang is supported. Install it in an "
                "environment of its own.",
            )
        ]
    plain = (site.version or "").partition("+")[0]
    if site.editable or survey.manifest is None or ".dev" in plain:
        return []
    if plain != survey.manifest.release and survey.state is not TreeState.FOREIGN:
        return [
            Fault(
                code="release-unknown",
                message=f"calls itself sglang {site.version}, but the files that the overlay "
                f"builds on are those of {survey.manifest.release}",
                path=str(site.dist_info),
                hint="Install a supported release with `pip install --force-reinstall "
                "--no-deps sglang==RELEASE`.",
            )
        ]
    return []


def _owner(site: Site) -> str | None:
    """Return the distribution whose RECORD claims ``sglang/__init__.py``, if any does."""
    for listing in sorted(site.root.glob("*.dist-info/RECORD")):
        if "sglang/__init__.py" in record.rows(listing.read_bytes()):
            return listing.parent.name.removesuffix(".dist-info")
    return None


def _clashes(survey: Survey) -> list[Fault]:
    """Say of each altered file what is wrong with it, and which hunk would not fit."""
    faults = []
    for report in survey.strangers():
        if survey.manifest is None or report.path not in survey.manifest.files:
            detail = "the overlay builds on this file as released"
        elif report.state is FileState.MISSING:
            detail = "the overlay has hooks in it"
        elif report.digest == "special":
            detail = "it is no file"
        else:
            detail = _first_clash(survey, report.path)
        verb = "is missing" if report.state is FileState.MISSING else "was changed"
        faults.append(
            Fault(
                code="file-modified",
                message=f"{verb}: {detail}",
                path=report.path,
                hint="Bring back the released file with `pip install --force-reinstall "
                "--no-deps sglang==RELEASE`; keep a change of your own as a patch to redo after.",
            )
        )
    return faults


def _first_clash(survey: Survey, path: str) -> str:
    assert survey.manifest is not None
    content = (survey.site.package_root / path).read_bytes()
    for patch in survey.source.series(survey.manifest.family).patches:
        for file in patch.files:
            if file.path != path:
                continue
            try:
                content = diff.apply(file, content)
            except Refused as refusal:
                return refusal.faults[0].message
    return "the hooks would still fit, but what they were tested with is not there"


def _folder_faults(survey: Survey) -> list[Fault]:
    """Refuse folders and files that lead out of the tree through a link."""
    site, faults = survey.site, []
    for folder in sorted({(site.package_root / f.path).parent for f in survey.files}):
        if folder.is_dir() and folder.resolve() != folder:
            faults.append(
                Fault(
                    code="link-out-of-tree",
                    message=f"lies at {folder.resolve()}, behind a symbolic link",
                    path=str(folder),
                    hint="Install with real files, or a source folder with `pip install -e`; then "
                    "pass the environment as --target.",
                )
            )
    places = [site.package_root / report.path for report in survey.files]
    places += [site.record] if site.record else []
    for path in places:
        if path.is_symlink() and not path.readlink().is_absolute():
            faults.append(
                Fault(
                    code="link-out-of-tree",
                    message=f"is a relative symbolic link to {path.readlink()}",
                    path=str(path),
                    hint="Install with real files (for uv: --link-mode copy), then apply.",
                )
            )
    return faults


def _unknown_release(survey: Survey) -> Fault:
    supported = ", ".join(sorted(m.release for m in survey.source.manifests))
    version = survey.site.version or "of no known version"
    if survey.manifest is None:
        message = f"sglang {version} is none of the supported releases: {supported}"
    else:
        names = ", ".join(f.path for f in survey.strangers())
        message = (
            f"sglang {version} is nearest to release {survey.manifest.release}, but these files "
            f"are not as released: {names}"
        )
    return Fault(
        code="release-unknown",
        message=message,
        path=str(survey.site.package_root / "sglang"),
        hint="Install a supported release with `pip install --force-reinstall --no-deps "
        "sglang==RELEASE`, or, for another release, follow docs/porting.md.",
    )
