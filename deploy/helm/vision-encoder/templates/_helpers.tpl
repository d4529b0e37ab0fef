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

{{/* The ConfigMap's data: what the switches add, and the settings given, which count. Those that would undo a
switch, or that the pod has from elsewhere, are refused: neither side would be what was asked for. */}}
{{- define "vision-encoder.settings" -}}
{{- include "vision-encoder.checkListen" . }}
{{- $data := dict }}
{{- $fixed := dict }}
{{- $brought := dict }}
{{- $switch := dict }}
{{- if .Values.tls.enabled }}
{{- $_ := set $data "VE_CONNECTION_AGE_S" "3600" }}
{{- $_ := set $fixed "VE_TLS_CERT" "/etc/vision-encoder/tls/tls.crt" }}
{{- $_ := set $fixed "VE_TLS_KEY" "/etc/vision-encoder/tls/tls.key" }}
{{- $_ := set $switch "VE_TLS_CERT" "tls" }}
{{- $_ := set $switch "VE_TLS_KEY" "tls" }}
{{- end }}
{{- if .Values.tokens.enabled }}
{{- $_ := set $fixed "VE_TOKENS_FILE" "/etc/vision-encoder/tokens/tokens" }}
{{- $_ := set $fixed "VE_OPEN_NAMESPACES" "false" }}
{{- $_ := set $switch "VE_TOKENS_FILE" "tokens" }}
{{- $_ := set $switch "VE_OPEN_NAMESPACES" "tokens" }}
{{- $_ := set $brought "VE_ADMIN_TOKEN" "tokens" }}
{{- end }}
{{- if .Values.broker.enabled }}
{{- $_ := set $data "VE_ARENA_BYTES" .Values.broker.arenaBytes }}
{{- $_ := set $brought "VE_BROKER_PATH" "broker" }}
{{- end }}
{{- if .Values.valkey.enabled }}
{{- $_ := set $data "VE_SHARED_PREFIX" "ve" }}
{{- $_ := set $data "VE_SHARED_TTL_S" "86400" }}
{{- $_ := set $brought "VE_SHARED_URL" "valkey" }}
{{- $_ := set $brought "VE_SHARED_SECRET" "valkey" }}
{{- end }}
{{- range $name, $by := $brought }}
{{- if hasKey $.Values.settings $name }}
{{- fail (printf "settings.%s is given, %s.enabled brings its own" $name $by) }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- $_ := set $data $name $value }}
{{- end }}
{{- range $name, $value := $fixed }}
{{- if and (hasKey $data $name) (ne (get $data $name) $value) }}
{{- fail (printf "settings.%s is %s, %s.enabled needs %s" $name (get $data $name | quote) (get $switch $name) (quote $value)) }}
{{- end }}
{{- $_ := set $data $name $value }}
{{- end }}
{{- toYaml $data }}
{{- end }}

{{/* Probes, Services and the NetworkPolicy have two ports, of every address of the pod. What is not said is the
service's own: this host alone. */}}
{{- define "vision-encoder.checkListen" -}}
{{- $listen := dict "VE_LISTEN" "127.0.0.1:50051" "VE_ADMIN_LISTEN" "127.0.0.1:8080" }}
{{- range $name, $value := .Values.settings }}
{{- $_ := set $listen $name $value }}
{{- end }}
{{- if eq (regexFind "(^|,) *(0\\.0\\.0\\.0|\\[::\\]):50051 *(,|$)" (get $listen "VE_LISTEN")) "" }}
{{- fail (printf "settings.VE_LISTEN is %s, probes and Services need 0.0.0.0:50051 in it, or [::]:50051" (get $listen "VE_LISTEN" | quote)) }}
{{- end }}
{{- $admin := get $listen "VE_ADMIN_LISTEN" }}
{{- if eq $admin "" }}
{{- range $name, $on := dict "monitoring" .Values.monitoring.enabled "tls" .Values.tls.enabled }}
{{- if $on }}
{{- fail (printf "settings.VE_ADMIN_LISTEN is \"\", %s.enabled needs the admin plane" $name) }}
{{- end }}
{{- end }}
{{- else if eq (regexFind "^(0\\.0\\.0\\.0|\\[::\\]):8080$" $admin) "" }}
{{- fail (printf "settings.VE_ADMIN_LISTEN is %s, probes and Services need 0.0.0.0:8080 or [::]:8080" (quote $admin)) }}
{{- end }}
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
