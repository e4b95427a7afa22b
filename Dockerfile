# The `kmq` command, tracker and gateway included:  docker build -t kmqpy . && docker run kmqpy tracker --help
FROM python:3.11-slim
WORKDIR /app
COPY requirements.lock pyproject.toml README.md LICENSE sbom.cdx.json ./
COPY kmqpy kmqpy
COPY tracker tracker
# The lock holds what tests need, too; constraining the install to it keeps the image small.
RUN grep -vE '^ +--hash' requirements.lock | sed 's/ \\$//' > constraints.txt \
 && pip install --no-cache-dir --constraint constraints.txt ".[cli,gateway,redis,sasl,sql]" \
 && rm constraints.txt
# A volume on it can hold the keys of a gateway: it gets these permissions.
RUN mkdir -m 1777 keys
USER nobody
ENTRYPOINT ["kmq"]
CMD ["--help"]
