{{/* Of all objects. Pods' names are this and seventeen characters more, and lie in a socket's path. */}}
{{- define "vision-encoder.name" -}}
{{ default .Release.Name .Values.fullnameOverride | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Of a Secret: as given, or the release's own. */}}
{{- define "vision-encoder.tlsSecret" -}}
{{ default (printf "%s-tls" (include "vision-encoder.name" .)) .Values.tls.secret }}
{{- end }}

{{- define "vision-encoder.tokensSecret" -}}
{{ default (printf "%s-tokens" (include "vision-encoder.name" .)) .Values.tokens.secret }}
{{- end }}

{{- define "vision-encoder.valkeySecret" -}}
{{ default (printf "%s-valkey" (include "vision-encoder.name" .)) .Values.valkey.secret }}
{{- end }}

{{- define "vision-encoder.selector" -}}
app.kubernetes.io/name: vision-encoder
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: encoder
{{- end }}

{{- define "vision-encoder.valkeySelector" -}}
app.kubernetes.io/name: vision-encoder
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: valkey
{{- end }}

{{- define "vision-encoder.labels" -}}
app.kubernetes.io/name: vision-encoder
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "vision-encoder.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end }}

{{/* The ConfigMap's data: the settings given, and what the switches add. */}}
{{- define "vision-encoder.settings" -}}
{{- $data := dict }}
{{- range $name, $value := .Values.settings }}
{{- $_ := set $data $name $value }}
{{- end }}
{{- if .Values.tls.enabled }}
{{- $_ := set $data "VE_TLS_CERT" "/etc/vision-encoder/tls/tls.crt" }}
{{- $_ := set $data "VE_TLS_KEY" "/etc/vision-encoder/tls/tls.key" }}
{{- $_ := set $data "VE_CONNECTION_AGE_S" "3600" }}
{{- end }}
{{- if .Values.tokens.enabled }}
{{- $_ := set $data "VE_TOKENS_FILE" "/etc/vision-encoder/tokens/tokens" }}
{{- $_ := set $data "VE_OPEN_NAMESPACES" "false" }}
{{- end }}
{{- if .Values.broker.enabled }}
{{- $_ := set $data "VE_ARENA_BYTES" .Values.broker.arenaBytes }}
{{- end }}
{{- if .Values.valkey.enabled }}
{{- $_ := set $data "VE_SHARED_PREFIX" "ve" }}
{{- $_ := set $data "VE_SHARED_TTL_S" "86400" }}
{{- end }}
{{- toYaml $data }}
{{- end }}

{{/* As given, and with a broker on nodes where there are readers and nowhere else. */}}
{{- define "vision-encoder.affinity" -}}
{{- $affinity := dict }}
{{- if hasKey .Values.pod "affinity" }}
{{- $affinity = deepCopy .Values.pod.affinity }}
{{- end }}
{{- if .Values.broker.enabled }}
{{- $readers := include "vision-encoder.readers" . | fromYaml }}
{{- $affinity = mergeOverwrite $affinity $readers }}
{{- end }}
{{- toYaml $affinity }}
{{- end }}

{{- define "vision-encoder.readers" -}}
podAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      namespaceSelector: {}
      labelSelector:
        matchLabels:
          vision-encoder/reader: "true"
{{- end }}

{{/* Labels of what the Prometheus operator reads, which it may select by. */}}
{{- define "vision-encoder.monitoringLabels" -}}
{{ include "vision-encoder.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What a changed Secret of the chart's own, or changed weights, roll the pods by. */}}
{{- define "vision-encoder.checksums" -}}
checksum/config: {{ include "vision-encoder.settings" . | sha256sum }}
{{- if eq .Values.weights.source "fetch" }}
checksum/weights: {{ printf "%s %s" .Values.weights.fetch.baseUrl .Values.weights.fetch.sums | sha256sum }}
{{- end }}
{{- if and .Values.tokens.enabled .Values.tokens.admin }}
checksum/admin: {{ .Values.tokens.admin | sha256sum }}
{{- end }}
{{- if and .Values.valkey.enabled .Values.valkey.password }}
checksum/valkey: {{ printf "%s %s %s" .Values.valkey.url .Values.valkey.password .Values.valkey.sharedSecret | sha256sum }}
{{- end }}
{{- end }}

{{/* The gRPC probe, or with TLS, which the kubelet's gRPC probes do not speak, the admin plane's. */}}
{{- define "vision-encoder.probe" -}}
{{- if .tls }}
httpGet:
  path: {{ .path }}
  port: admin
{{- else }}
grpc:
  port: 50051
  service: vision_encoder.v1.VisionEncoder
{{- end }}
{{- end }}
