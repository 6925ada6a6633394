"""JVMs of their own, without Spark, that commit to one log on S3 by a log store of Delta's interface."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway  # type: ignore[import-untyped]
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

from deploy.install import java
from spark.engine import jars
from tests.s3 import BUCKET

DELTAS_OWN: Final = "io.delta.storage.S3SingleDriverLogStore"
_CONFLICT: Final = "java.nio.file.FileAlreadyExistsException"


class Writer:
    """A process with a log store of a class."""

    def __init__(self, settings: Mapping[str, str], log_store: str = jars.LOG_STORE_CLASS) -> None:
        theirs = Path(pyspark.__path__[0], "jars")
        paths = [*jars.find(), *jars.find_s3(), theirs / "*"]
        (bridge,) = theirs.glob("py4j-*.jar")
        port, self.process = launch_gateway(
            jarpath=str(bridge),
            classpath=":".join(map(str, paths)),
            java_path=str(java.home() / "bin" / "java"),
            javaopts=["-Xmx256m", "-XX:TieredStopAtLevel=1"],
            die_on_exit=True,
            return_proc=True,
        )
        # Without memory management py4j does not tell a killed JVM which objects are collected, over sockets left open.
        parameters = GatewayParameters(port=port, auto_convert=True, enable_memory_management=False)
        self._gateway = JavaGateway(gateway_parameters=parameters)
        self.jvm: Any = self._gateway.jvm
        self.configuration = self.jvm.org.apache.hadoop.conf.Configuration()
        for name, value in settings.items():
            self.configuration.set(name, value)
        package, _, name = log_store.rpartition(".")
        store: Any = self.jvm
        for part in (*package.split("."), name):
            store = getattr(store, part)
        self._store = store(self.configuration)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gateway.close()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def commit(self, name: str, *lines: Any, overwrite: bool = False) -> bool:
        """Write an object of the log, and return True; False if another commit has it.

        Raises:
            Py4JJavaError: any other error of the log store.
        """
        path = self.jvm.org.apache.hadoop.fs.Path(f"s3a://{BUCKET}/{name}")
        try:
            self._store.write(path, self.jvm.java.util.ArrayList(list(lines)).iterator(), overwrite, self.configuration)
        except Py4JJavaError as error:
            if error.java_exception.getClass().getName() == _CONFLICT:
                return False
            raise
        return True
