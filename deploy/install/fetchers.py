"""Two fetchers of jars from the user's Maven repository: Maven itself, and the Ivy in PySpark.

Both fetch each artifact by its exact coordinates, without transitive dependencies, and put `artifact-version.jar` into
`folder/kind/`. The repository is that of their own configuration.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from xml.sax.saxutils import quoteattr

from deploy.console import StackError, call
from deploy.install import java

_TIMEOUT_S = 900.0  # for 60 MB over a slow network
_MAVEN_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"


class Artifact(Protocol):
    """A jar to fetch: its coordinates, and the folder (kind) it belongs to."""

    @property
    def kind(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def artifact(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def classifier(self) -> str: ...
    @property
    def type(self) -> str: ...


Fetcher = Callable[[Sequence[Artifact], Path], None]


class FetchError(RuntimeError):
    """A fetcher failed; the text has the end of its output."""


def fetchers() -> list[Fetcher]:
    """List the fetchers that are installed, in order of choice: Maven takes seconds, Ivy most of a minute."""
    found: list[Fetcher] = []
    if shutil.which("mvn"):
        found.append(with_maven)
    if ivy_jar():
        found.append(with_ivy)
    return found


def with_maven(artifacts: Sequence[Artifact], folder: Path) -> None:
    """Copy all artifacts in one run of Maven's dependency plugin.

    Raises:
        FetchError: Maven failed.
    """
    project = folder / "pom.xml"
    project.write_text(_pom(artifacts, folder))
    _run(["mvn", "--batch-mode", "--file", project, "validate"], folder)


def with_ivy(artifacts: Sequence[Artifact], folder: Path) -> None:
    """Retrieve the artifacts with the Ivy in PySpark, with its built-in settings.

    Raises:
        FetchError: PySpark is not installed, or Ivy failed.
    """
    ivy = ivy_jar()
    if ivy is None:
        raise FetchError("no Ivy here: PySpark, which brings it, is not installed")
    module = folder / "ivy.xml"
    module.write_text(_ivy_module(artifacts))
    target = folder / "[conf]" / "[artifact]-[revision](-[classifier]).[ext]"
    command: list[str | Path] = [java.home() / "bin" / "java", "-jar", ivy, "-ivy", module]
    command += ["-cache", folder / "ivy-cache", "-retrieve", target]
    command += ["-types", "bundle", *sorted({a.type for a in artifacts})]  # Ivy calls some jars OSGi bundles
    _run(command, folder)


def ivy_jar() -> Path | None:
    """Find the Ivy jar in PySpark; None if PySpark is not installed."""
    found = importlib.util.find_spec("pyspark")
    folders = found.submodule_search_locations if found else None
    return next((jar for folder in folders or () for jar in Path(folder).glob("jars/ivy-*.jar")), None)


def _run(command: Sequence[str | Path], folder: Path) -> None:
    try:
        call(command, timeout_s=_TIMEOUT_S, folder=folder, environment={**os.environ, **java.environment()})
    except StackError as error:
        raise FetchError(str(error)) from error


def _pom(artifacts: Sequence[Artifact], folder: Path) -> str:
    """Make a Maven project that only copies the artifacts."""
    items = "\n".join(
        f"<artifactItem><groupId>{a.group}</groupId><artifactId>{a.artifact}</artifactId>"
        f"<version>{a.version}</version><type>{a.type}</type>"
        f"{a.classifier and f'<classifier>{a.classifier}</classifier>'}"
        f"<outputDirectory>{folder / a.kind}</outputDirectory></artifactItem>"
        for a in artifacts
    )
    group, artifact, version = _MAVEN_PLUGIN.split(":")
    return f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>fencepost</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
<build><plugins><plugin>
<groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>
<executions><execution><phase>validate</phase><goals><goal>copy</goal></goals><configuration><artifactItems>
{items}
</artifactItems></configuration></execution></executions>
</plugin></plugins></build>
</project>
"""


def _ivy_module(artifacts: Sequence[Artifact]) -> str:
    """Make an Ivy module with one configuration for each kind; `all` keeps several versions of a jar."""
    confs = "\n".join(f"<conf name={quoteattr(kind)}/>" for kind in sorted({a.kind for a in artifacts}))
    dependencies = "\n".join(
        f"<dependency org={quoteattr(a.group)} name={quoteattr(a.artifact)} rev={quoteattr(a.version)} "
        f'transitive="false" conf={quoteattr(f"{a.kind}->master")}>{_ivy_artifact(a)}</dependency>'
        for a in artifacts
    )
    return f"""<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
<info organisation="fencepost" module="jars"/>
<configurations>
{confs}
</configurations>
<dependencies>
{dependencies}
<conflict manager="all"/>
</dependencies>
</ivy-module>
"""


def _ivy_artifact(a: Artifact) -> str:
    """Name the jar with a classifier in place of the module's own."""
    if not a.classifier:
        return ""
    return f"<artifact name={quoteattr(a.artifact)} type={quoteattr(a.type)} m:classifier={quoteattr(a.classifier)}/>"
