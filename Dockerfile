# Three images: `--target service` (the default), `--target spark`, the audit, and `--target spark-s3`, the audit with what a
# lake or a report on S3 needs.
#
# BASE is any Debian with Python 3.11 or 3.12, its venv and CA certificates. Packages come from the indexes that the
# builder is configured with. Their checksums are locked: wheels by uv.lock, jars by spark/*.lock.
ARG BASE=python:3.11-slim-bookworm

# ------------------------------------------------------------------------------------------ how packages come in
FROM ${BASE} AS tools
# pip and uv trust the CAs that the base image trusts, also a company's own.
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
# uv, and setuptools to build the one package (pyspark) that has no wheel; each by the checksums of its wheels.
RUN printf '%s\n' \
      'uv==0.13.9 --hash=sha256:d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19 --hash=sha256:5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe' \
      > /tmp/uv.txt \
 && printf '%s\n' \
      'setuptools==80.9.0 --hash=sha256:062d34222ad13e0cc312a4c02d73f059e86a4acbfbdea8f8f76b28c99f306922' \
      > /tmp/setuptools.txt \
 && python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r /tmp/uv.txt
ENV PATH=/opt/uv/bin:$PATH \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_PROJECT_ENVIRONMENT=/opt/fencepost \
    UV_PYTHON=python3 \
    UV_PYTHON_DOWNLOADS=never
WORKDIR /build
COPY pyproject.toml uv.lock ./

# The service's inner loops in C. An image always has them: without a compiler here the build fails.
FROM tools AS native
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && { test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
   || apt-get install --yes --no-install-recommends python3-dev; } \
 && rm -rf /var/lib/apt/lists/*
RUN uv sync --frozen --no-install-project --no-build --only-group build
COPY service/native service/native
RUN /opt/fencepost/bin/cythonize --inplace service/native/*.pyx \
 && rm service/native/*.c

FROM tools AS service-packages
# Further extras, such as `--extra msk` (Amazon MSK's IAM, with AWS's SDK).
ARG EXTRAS=""
RUN uv sync --frozen --no-dev --no-install-project --no-build --extra service --extra tracing --extra registry \
      ${EXTRAS}
COPY service /app/service
COPY --from=native /build/service/native /app/service/native
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /app

FROM tools AS spark-packages
# Further extras, such as `--extra iceberg` (sinks that are Iceberg tables).
ARG EXTRAS=""
# The second sync removes setuptools again. PySpark's examples are not needed.
RUN uv venv --quiet /opt/fencepost \
 && VIRTUAL_ENV=/opt/fencepost uv pip install --quiet --require-hashes -r /tmp/setuptools.txt \
 && uv sync --frozen --inexact --no-dev --no-install-project --no-build-isolation-package pyspark --extra spark \
      ${EXTRAS} \
 && uv sync --frozen --no-dev --no-install-project --extra spark ${EXTRAS} \
 && rm -rf /opt/fencepost/lib/python3*/site-packages/pyspark/examples
COPY service/__init__.py /app/service/
COPY service/contract /app/service/contract
COPY spark /app/spark
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /app

# ------------------------------------------------------------------------------------------------- the audit
FROM ${BASE} AS java
RUN command -v java \
 || { apt-get update \
   && apt-get install --yes --no-install-recommends openjdk-17-jre-headless \
   && rm -rf /var/lib/apt/lists/*; }

FROM java AS jars
COPY --from=spark-packages /opt/fencepost /opt/fencepost
WORKDIR /build
COPY deploy deploy
COPY spark/engine/jars.lock spark/engine/jars.lock
# Fetched by the Ivy in PySpark, each checked against its line in the lock.
RUN FENCEPOST_CACHE=/build/cache /opt/fencepost/bin/python -c \
      'from deploy.install import jars; jars.ensure(jars.read_lock("spark", jars.LOCKS["spark"]))'

# hadoop-aws, modules of the AWS SDK, and the log store, which the compiler in Spark makes of its source.
FROM jars AS s3-jars
COPY spark spark
RUN FENCEPOST_CACHE=/build/cache /opt/fencepost/bin/python -m deploy.install.s3

FROM java AS spark
# A new volume mounted at /data takes the owner of this folder.
RUN echo 'fencepost:x:10001:' >> /etc/group \
 && echo 'fencepost:x:10001:10001:Fencepost:/tmp:/usr/sbin/nologin' >> /etc/passwd \
 && install --directory --owner=10001 --group=10001 /data
COPY --from=spark-packages /opt/fencepost /opt/fencepost
COPY --from=spark-packages /app /app
COPY --from=jars /build/cache/jars/spark /opt/jars
# The Spark Operator and spark-submit start drivers and executors by this entry point; it runs other commands as they are.
COPY --chmod=755 deploy/kubernetes/spark-entrypoint /opt/entrypoint.sh
COPY deploy/kubernetes/spark-main.py /opt/audit.py
ENV PATH=/opt/fencepost/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    FENCEPOST_JARS=/opt/jars
# Spark's scratch files and Java's go here: an emptyDir under a read-only root.
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["/opt/entrypoint.sh"]
CMD ["python", "-m", "spark", "--help"]

FROM spark AS spark-s3
COPY --from=s3-jars /build/cache/jars/spark /opt/jars
# Settings of S3 are in spark-defaults.conf, a file of the audit's secret.
ENV SPARK_CONF_DIR=/etc/fencepost-audit

# ----------------------------------------------------------------------------------------------- the service
FROM ${BASE} AS service
RUN echo 'fencepost:x:10001:' >> /etc/group \
 && echo 'fencepost:x:10001:10001:Fencepost:/tmp:/usr/sbin/nologin' >> /etc/passwd
COPY --from=service-packages /opt/fencepost /opt/fencepost
COPY --from=service-packages /app /app
ENV PATH=/opt/fencepost/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /app
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["python", "-m", "service"]
