{{/* Of all objects. Pods' names are this and seventeen characters more, and lie in a socket's path. */}}
{{- define "vision-encoder.name" -}}
{{ default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "vision-encoder.selector" -}}
app.kubernetes.io/name: vision-encoder
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: encoder
{{- end }}

{{- define "vision-encoder.valkeySelector" -}}
app.kubernetes.io/name: vision-encoder
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: valkey
{{- end }}

{{- define "vision-encoder.labels" -}}
app.kubernetes.io/name: vision-encoder
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
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
