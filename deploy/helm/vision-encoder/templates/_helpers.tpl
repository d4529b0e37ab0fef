{{/* Name of all objects, at most 40 characters: a pod adds 17, and its name is part of a socket's path. */}}
{{- define "vision-encoder.name" -}}
{{ default .Release.Name .Values.fullnameOverride | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Names of Secrets: as given, or the release's own. */}}
{{- define "vision-encoder.tlsSecret" -}}
{{ default (printf "%s-tls" (include "vision-encoder.name" .)) .Values.tls.secret }}
{{- end }}

{{- define "vision-encoder.tokensSecret" -}}
{{ default (printf "%s-tokens" (include "vision-encoder.name" .)) .Values.tokens.secret }}
{{- end }}

{{- define "vision-encoder.selector" -}}
app.kubernetes.io/name: vision-encoder
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: encoder
{{- end }}

{{- define "vision-encoder.gatewaySelector" -}}
app.kubernetes.io/name: vision-encoder-gateway
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "vision-encoder.labels" -}}
app.kubernetes.io/name: vision-encoder
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Labels by which a Prometheus operator selects its objects. */}}
{{- define "vision-encoder.monitoringLabels" -}}
{{ include "vision-encoder.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of every pod's spec, with the user id that runs it, and kernel settings. */}}
{{- define "vision-encoder.pod" -}}
serviceAccountName: {{ include "vision-encoder.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: {{ ne (int .user) 0 }}
  runAsUser: {{ int .user }}
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
  {{- with .sysctls }}
  sysctls:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Pods with these labels stand in different zones and on different nodes where they can. */}}
{{- define "vision-encoder.spread" -}}
{{- $labels := . }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- $labels | nindent 6 }}
{{- end }}
{{- end }}

{{- define "vision-encoder.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end }}

{{/* The ConfigMap's data: the settings that the switches need, and those of the values. A value that contradicts a
switch, or that the pod sets by itself, fails the rendering. */}}
{{- define "vision-encoder.settings" -}}
{{- include "vision-encoder.checkListen" . }}
{{- include "vision-encoder.checkMemory" . }}
{{- $data := dict }}
{{- $fixed := dict }}
{{- if and (eq .Values.weights.source "hub") (hasPrefix "/" (default "/" .Values.settings.VE_MODEL)) }}
{{- fail "weights.source is hub: settings.VE_MODEL needs the model's id, ORG/NAME or ORG/NAME@REVISION" }}
{{- end }}
{{- if .Values.tls.enabled }}
{{- $_ := set $data "VE_CONNECTION_AGE_S" "3600" }}
{{- $_ := set $fixed "VE_TLS_CERT" (list "tls" "/etc/vision-encoder/tls/tls.crt") }}
{{- $_ := set $fixed "VE_TLS_KEY" (list "tls" "/etc/vision-encoder/tls/tls.key") }}
{{- if .Values.tls.clientCertificates }}
{{- $_ := set $fixed "VE_TLS_CLIENT_CA" (list "tls" "/etc/vision-encoder/tls/ca.crt") }}
{{- end }}
{{- end }}
{{- if .Values.tokens.enabled }}
{{- $_ := set $fixed "VE_TOKENS_FILE" (list "tokens" "/etc/vision-encoder/tokens/tokens") }}
{{- $_ := set $fixed "VE_OPEN_NAMESPACES" (list "tokens" "false") }}
{{- if hasKey .Values.settings "VE_ADMIN_TOKEN" }}
{{- fail "settings.VE_ADMIN_TOKEN is given, tokens.enabled takes it from the Secret" }}
{{- end }}
{{- end }}
{{- if .Values.broker.enabled }}
{{- if hasKey .Values.settings "VE_BROKER_PATH" }}
{{- fail "settings.VE_BROKER_PATH is given, broker.enabled makes it from the pod's name" }}
{{- end }}
{{- end }}
{{- if .Values.choicesClaim }}
{{- $_ := set $fixed "VE_CHOICES_DIR" (list "choicesClaim" "/var/cache/vision-encoder") }}
{{- end }}
{{- if .Values.http.enabled }}
{{- $_ := set $fixed "VE_HTTP_LISTEN" (list "http" "0.0.0.0:8000") }}
{{- else if .Values.settings.VE_HTTP_LISTEN }}
{{- fail "settings.VE_HTTP_LISTEN is given, http.enabled sets it and opens its port" }}
{{- end }}
{{- if .Values.sglang.enabled }}
{{- if not .Values.networkPolicy.enabled }}
{{- fail "sglang.enabled needs networkPolicy.enabled: the protocol has no tokens" }}
{{- end }}
{{- $_ := set $fixed "VE_SERVE_SGLANG" (list "sglang" "0.0.0.0:31000") }}
{{- if hasKey .Values.settings "VE_SGLANG_URL" }}
{{- fail "settings.VE_SGLANG_URL is given, sglang.enabled makes it from the pod's address" }}
{{- end }}
{{- else if .Values.settings.VE_SERVE_SGLANG }}
{{- fail "settings.VE_SERVE_SGLANG is given, sglang.enabled sets it and opens its port" }}
{{- end }}
{{- if .Values.tokenspeed.enabled }}
{{- if not .Values.networkPolicy.enabled }}
{{- fail "tokenspeed.enabled needs networkPolicy.enabled: the protocol has no tokens" }}
{{- end }}
{{- $_ := set $fixed "VE_TOKENSPEED_BOOTSTRAP_PORT" (list "tokenspeed" "8998") }}
{{- end }}
{{- if hasKey .Values.settings "VE_SERVE_TOKENSPEED" }}
{{- fail "settings.VE_SERVE_TOKENSPEED is given, tokenspeed.enabled makes it from the pod's address and opens its ports" }}
{{- end }}
{{- $data = merge (deepCopy .Values.settings) $data }}
{{- range $name, $rule := $fixed }}
{{- $value := index $rule 1 }}
{{- if ne (get $data $name | default $value) $value }}
{{- fail (printf "settings.%s is %s, %s.enabled needs %s" $name (get $data $name | quote) (index $rule 0) (quote $value)) }}
{{- end }}
{{- $_ := set $data $name $value }}
{{- end }}
{{- toYaml $data }}
{{- end }}

{{/* Probes, Services and the NetworkPolicy use ports 50051 and 8080 of the pod's address. */}}
{{- define "vision-encoder.checkListen" -}}
{{- $listen := .Values.settings.VE_LISTEN | default "127.0.0.1:50051" }}
{{- if not (regexMatch "(^|,) *(0\\.0\\.0\\.0|\\[::\\]):50051 *(,|$)" $listen) }}
{{- fail (printf "settings.VE_LISTEN is %s, probes and Services need 0.0.0.0:50051 in it, or [::]:50051" (quote $listen)) }}
{{- end }}
{{- $admin := dig "VE_ADMIN_LISTEN" "127.0.0.1:8080" .Values.settings }}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\]):8080$" $admin) }}
{{- fail (printf "settings.VE_ADMIN_LISTEN is %s, probes and Services need 0.0.0.0:8080 or [::]:8080" (quote $admin)) }}
{{- end }}
{{- end }}

{{/* The pod's memory limit holds what the settings admit. */}}
{{- define "vision-encoder.checkMemory" -}}
{{- $gib := "1073741824" }}
{{- $settings := .Values.settings }}
{{- $queued := get $settings "VE_MAX_QUEUED_BYTES" | default (mul 2 $gib) | int64 }}
{{- $numTimes := add 3 (ternary 1 0 .Values.http.enabled) (ternary 1 0 .Values.sglang.enabled) (ternary 1 0 .Values.tokenspeed.enabled) }}
{{- $needed := add $gib
    (get $settings "VE_ARENA_BYTES" | default (mul 2 $gib) | int64)
    (mul $numTimes $queued)
    (get $settings "VE_MAX_DECODED_BYTES" | default $gib | int64)
    (get $settings "VE_MAX_UNDELIVERED_BYTES" | default $gib | int64) }}
{{- $limit := dig "limits" "memory" "" .Values.resources | toString }}
{{- if $limit }}
{{- $unit := get (dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824) (regexFind "[A-Za-z]*$" $limit) }}
{{- $bytes := mulf (regexFind "^[0-9.]+" $limit | float64) $unit | int64 }}
{{- if lt $bytes $needed }}
{{- fail (printf "resources.limits.memory is %s, the settings VE_ARENA_BYTES, VE_MAX_QUEUED_BYTES (%d times), VE_MAX_DECODED_BYTES and VE_MAX_UNDELIVERED_BYTES admit %dMi with the process itself: raise the limit or lower these" $limit $numTimes (div $needed 1048576)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A rule of a NetworkPolicy, from networkPolicy's values. */}}
{{- define "vision-encoder.dnsEgress" -}}
- to:
    {{- toYaml .dns | nindent 4 }}
  ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end }}

{{/* As given. With a broker, encoders of a Deployment run on nodes that have readers. A DaemonSet's pod would wait
without end where no reader is. */}}
{{- define "vision-encoder.affinity" -}}
{{- $affinity := deepCopy (.Values.pod.affinity | default dict) }}
{{- if and .Values.broker.enabled (eq .Values.kind "Deployment") }}
{{- $affinity = mergeOverwrite $affinity (include "vision-encoder.readers" . | fromYaml) }}
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

{{/* Changes of these roll the pods. The tokens' file is followed without a restart. */}}
{{- define "vision-encoder.checksums" -}}
checksum/config: {{ include "vision-encoder.settings" . | sha256sum }}
{{- if and .Values.tokens.enabled .Values.tokens.admin }}
checksum/admin: {{ .Values.tokens.admin | sha256sum }}
{{- end }}
{{- end }}

{{/* gRPC health. With TLS, which the kubelet's gRPC probes cannot do, the admin plane's pages. */}}
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

{{- define "vision-encoder.gatewayProbe" -}}
httpGet:
  path: /ready
  port: operations
{{- end }}

{{/* deploy/envoy/gateway.yaml, which files/gateway.yaml is a link to, with what depends on the release. */}}
{{- define "vision-encoder.gatewayConfig" -}}
{{- $encoders := printf "%s.%s.svc" (include "vision-encoder.name" .) .Release.Namespace }}
{{- $changes := dict
    "vision-encoder-headless" $encoders
    "max_heap_size_bytes: 1610612736" (printf "max_heap_size_bytes: %s" .Values.gateway.maxHeapBytes) }}
{{- if .Values.tls.enabled }}
{{- $calls := "per_connection_buffer_limit_bytes: 1048576\n      filter_chains:\n        - filters:\n" }}
{{- $downstream := include "vision-encoder.gatewayDownstreamTls" . | indent 10 | trim }}
{{- $_ := set $changes $calls (replace "filters:\n" (printf "%s\n          filters:\n" $downstream) $calls) }}
{{- $cluster := "  clusters:\n    - name: encoders\n" }}
{{- $_ := set $changes $cluster (printf "%s%s\n" $cluster (include "vision-encoder.gatewayUpstreamTls" . | trim | indent 6)) }}
{{- end }}
{{- $config := .Files.Get "files/gateway.yaml" }}
{{- range $from, $to := $changes }}
{{- if not (contains $from $config) }}
{{- fail (printf "files/gateway.yaml has no %s" (quote $from)) }}
{{- end }}
{{- $config = replace $from $to $config }}
{{- end }}
{{- $config }}
{{- end }}

{{/* Certificate and authority by SDS from files, so that Envoy follows renewed ones. */}}
{{- define "vision-encoder.gatewayCertificate" -}}
alpn_protocols: [h2]
tls_certificate_sds_secret_configs:
  - name: certificate
    sds_config: {path_config_source: {path: /etc/gateway/certificate.yaml}}
{{- end }}

{{- define "vision-encoder.gatewayDownstreamTls" -}}
transport_socket:
  name: envoy.transport_sockets.tls
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
    require_client_certificate: {{ .Values.tls.clientCertificates }}
    common_tls_context:
      {{- include "vision-encoder.gatewayCertificate" . | nindent 6 }}
      {{- if .Values.tls.clientCertificates }}
      validation_context_sds_secret_config:
        name: authority
        sds_config: {path_config_source: {path: /etc/gateway/authority.yaml}}
      {{- end }}
{{- end }}

{{- define "vision-encoder.gatewayUpstreamTls" -}}
{{- $encoders := printf "%s.%s.svc" (include "vision-encoder.name" .) .Release.Namespace }}
transport_socket:
  name: envoy.transport_sockets.tls
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
    sni: {{ $encoders }}
    common_tls_context:
      {{- include "vision-encoder.gatewayCertificate" . | nindent 6 }}
      combined_validation_context:
        default_validation_context:
          match_typed_subject_alt_names:
            - san_type: DNS
              matcher: {exact: {{ $encoders }}}
        validation_context_sds_secret_config:
          name: authority
          sds_config: {path_config_source: {path: /etc/gateway/authority.yaml}}
{{- end }}
