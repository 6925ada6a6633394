{{/* The name of all objects. A pod's name, which is FENCEPOST_INSTANCE, has at most 63 characters. */}}
{{- define "fencepost.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-fencepost" .Release.Name) (contains "fencepost" .Release.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* The labels by which pods are selected; takes a list: the context, the name, the component. */}}
{{- define "fencepost.selector" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/component: {{ index . 2 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{/* The labels that all objects have; takes a list: the context, the name. */}}
{{- define "fencepost.labels" -}}
{{- $context := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ $context.Release.Name }}
app.kubernetes.io/version: {{ $context.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: fencepost
app.kubernetes.io/managed-by: {{ $context.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $context.Chart.Name $context.Chart.Version }}
{{- end }}

{{/* The labels of a workload and of its pods; takes a list: the context, the name, the component. */}}
{{- define "fencepost.podLabels" -}}
app.kubernetes.io/component: {{ index . 2 }}
{{ include "fencepost.labels" (list (index . 0) (index . 1)) }}
{{- end }}

{{/* The pods of this release; takes a list: the context, then names. */}}
{{- define "fencepost.pods" -}}
matchLabels:
  app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- if eq (len .) 1 }}
  app.kubernetes.io/part-of: fencepost
{{- else if eq (len .) 2 }}
  app.kubernetes.io/name: {{ index . 1 }}
{{- else }}
matchExpressions:
  - key: app.kubernetes.io/name
    operator: In
    values: {{ rest . | toJson }}
{{- end }}
{{- end }}

{{/* An image; takes a list: the context, then `service` or `audit`. */}}
{{- define "fencepost.image" -}}
{{- $image := index (index . 0).Values.image (index . 1) -}}
{{ $image.repository }}:{{ default (index . 0).Chart.AppVersion $image.tag }}
{{- end }}

{{- define "fencepost.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "fencepost.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "fencepost.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The name of the port that serves health and metrics. */}}
{{- define "fencepost.managementPort" -}}
{{ ternary "management" "http" .Values.management.enabled }}
{{- end }}

{{/* All settings, those of the values last, as YAML. */}}
{{- define "fencepost.settings" -}}
{{- $settings := dict "FENCEPOST_HOST" "0.0.0.0" "FENCEPOST_PORT" "8000" "FENCEPOST_RULES" "/etc/fencepost/rules.toml" -}}
{{- with .Values.kafka.saslTls }}{{ if .enabled }}
{{- $_ := set $settings "FENCEPOST_KAFKA_SECURITY_PROTOCOL" "SASL_SSL" -}}
{{- $_ := set $settings "FENCEPOST_KAFKA_SASL_MECHANISM" .mechanism -}}
{{- if ne .mechanism "OAUTHBEARER" }}
{{- $_ := set $settings "FENCEPOST_KAFKA_SASL_USERNAME" .username -}}
{{- $_ := set $settings "FENCEPOST_KAFKA_SASL_PASSWORD_FILE" "/etc/fencepost-kafka/password" -}}
{{- else if .oauth.tokenAudience }}
{{- $_ := set $settings "FENCEPOST_KAFKA_OAUTH_TOKEN_FILE" "/etc/fencepost-kafka/token" -}}
{{- else }}
{{- $_ := set $settings "FENCEPOST_KAFKA_OAUTH_TOKEN_URL" .oauth.tokenUrl -}}
{{- $_ := set $settings "FENCEPOST_KAFKA_OAUTH_CLIENT_ID" .oauth.clientId -}}
{{- $_ := set $settings "FENCEPOST_KAFKA_OAUTH_CLIENT_SECRET_FILE" "/etc/fencepost-kafka/client-secret" -}}
{{- if .oauth.scope }}{{ $_ := set $settings "FENCEPOST_KAFKA_OAUTH_SCOPE" .oauth.scope }}{{ end -}}
{{- end }}
{{- if and .oauth.extensions (eq .mechanism "OAUTHBEARER") }}
{{- $_ := set $settings "FENCEPOST_KAFKA_OAUTH_EXTENSIONS" .oauth.extensions -}}
{{- end }}
{{- $_ := set $settings "FENCEPOST_KAFKA_SSL_CAFILE" "/etc/fencepost-kafka/ca.crt" -}}
{{- end }}{{ end }}
{{- if .Values.redis.tls }}{{ $_ := set $settings "FENCEPOST_REDIS_CAFILE" "/etc/fencepost-redis/ca.crt" }}{{ end }}
{{- with .Values.registry }}{{ if .enabled }}
{{- $_ := set $settings "FENCEPOST_REGISTRY" .url -}}
{{- if .tls.enabled }}
{{- $_ := set $settings "FENCEPOST_REGISTRY_USERNAME" .tls.username -}}
{{- $_ := set $settings "FENCEPOST_REGISTRY_PASSWORD_FILE" "/etc/fencepost-registry/password" -}}
{{- $_ := set $settings "FENCEPOST_REGISTRY_CAFILE" "/etc/fencepost-registry/ca.crt" -}}
{{- end }}
{{- end }}{{ end }}
{{- if .Values.tracing.enabled }}
{{- $_ := set $settings "FENCEPOST_TRACING" "otlp" -}}
{{- $_ := set $settings "OTEL_EXPORTER_OTLP_ENDPOINT" .Values.tracing.endpoint -}}
{{- end }}
{{- with .Values.management }}{{ if .enabled }}{{ $_ := set $settings "FENCEPOST_MANAGEMENT_PORT" (toString .port) }}{{ end }}{{ end }}
{{- if .Values.https.enabled }}
{{- $_ := set $settings "FENCEPOST_HTTP_TLS_CERTFILE" "/etc/fencepost-https/tls.crt" -}}
{{- $_ := set $settings "FENCEPOST_HTTP_TLS_KEYFILE" "/etc/fencepost-https/tls.key" -}}
{{- end }}
{{- range $name, $value := .Values.settings }}{{ $_ := set $settings $name (toString $value) }}{{ end }}
{{- toYaml $settings }}
{{- end }}

{{/* The volume with what the login at Kafka needs. */}}
{{- define "fencepost.kafkaVolume" -}}
- name: kafka
  {{- with .Values.kafka.saslTls }}
  {{- if and (eq .mechanism "OAUTHBEARER") .oauth.tokenAudience }}
  projected:
    sources:
      - secret:
          name: {{ .secret }}
      - serviceAccountToken:
          audience: {{ .oauth.tokenAudience }}
          expirationSeconds: {{ .oauth.tokenSeconds }}
          path: token
  {{- else }}
  secret:
    secretName: {{ .secret }}
  {{- end }}
  {{- end }}
{{- end }}

{{/* The files at /etc/fencepost, as YAML. */}}
{{- define "fencepost.rules" -}}
{{- $files := dict "rules.toml" (default (.Files.Get "files/rules.toml") .Values.rules) -}}
{{- with .Values.audit.silences }}{{ $_ := set $files "silences.toml" . }}{{ end -}}
{{- toYaml (merge $files .Values.schemas) }}
{{- end }}

{{/* Paths of the API that callers outside the cluster may reach: not health, metrics and documentation. */}}
{{- define "fencepost.paths" -}}
[/events, /sources, /topics, /v3, /kafka, /problems]
{{- end }}

{{/* Stops the installation where values contradict each other; each text says what to set. */}}
{{- define "fencepost.check" -}}
{{- $settings := include "fencepost.settings" . | fromYaml -}}
{{- $most := .Values.autoscaling.maxReplicas | int -}}
{{- $surge := divf $most 4 | ceil | int -}}
{{- $needed := mul (add $most $surge) ($settings.FENCEPOST_SLOTS | int) -}}
{{- if gt $needed ($settings.FENCEPOST_SLOTS_MAX | int64) -}}
{{- fail (printf "%d pods, and %d more in an update, hold %d slots: set settings.FENCEPOST_SLOTS_MAX to %d or more, or lower autoscaling.maxReplicas" $most $surge $needed $needed) -}}
{{- end -}}
{{- if lt $most (.Values.autoscaling.minReplicas | int) -}}
{{- fail (printf "autoscaling.maxReplicas is less than minReplicas: set it to %d or more" (.Values.autoscaling.minReplicas | int)) -}}
{{- end -}}
{{- with .Values.kafka.saslTls -}}
{{- if and .enabled (eq .mechanism "OAUTHBEARER") (eq (empty .oauth.tokenUrl) (empty .oauth.tokenAudience)) -}}
{{- fail "kafka.saslTls.mechanism OAUTHBEARER needs one source of tokens: set oauth.tokenUrl or oauth.tokenAudience" -}}
{{- end -}}
{{- if and .enabled .oauth.tokenUrl (not .oauth.clientId) -}}
{{- fail "kafka.saslTls.oauth.tokenUrl needs oauth.clientId: set it" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.tls .Values.redis.url (not (hasPrefix "rediss" .Values.redis.url)) -}}
{{- fail "redis.tls needs a redis.url that begins with rediss:// or rediss+" -}}
{{- end -}}
{{- if and .Values.redis.url (ne .Values.redis.sentinel.enabled (regexMatch "^rediss?\\+sentinel:" .Values.redis.url)) -}}
{{- fail "redis.sentinel.enabled and a redis.url that begins with redis+sentinel:// go together: set both, or neither" -}}
{{- end -}}
{{- if and .Values.registry.enabled .Values.registry.tls.enabled (not (hasPrefix "https://" .Values.registry.url)) -}}
{{- fail "registry.tls needs a registry.url that begins with https://" -}}
{{- end -}}
{{- if and .Values.https.enabled (not .Values.management.enabled) -}}
{{- fail "https.enabled needs management.enabled: probes and scrapes speak HTTP without TLS" -}}
{{- end -}}
{{- if and .Values.https.enabled (or .Values.ingress.enabled .Values.gateway.enabled) -}}
{{- fail "https.enabled is for clients that reach the pods themselves: TLS ends there, or at ingress or gateway; enable one" -}}
{{- end -}}
{{- if and .Values.monitoring.enabled (not .Values.audit.enabled) -}}
{{- fail "monitoring.enabled needs audit.enabled: its alerts are about the audit too" -}}
{{- end -}}
{{- end }}
