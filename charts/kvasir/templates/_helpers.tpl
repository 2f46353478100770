{{/* Name of the chart's objects; the longest suffix is -operator. */}}
{{- define "kvasir.fullname" -}}
{{- $name := .Release.Name }}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end }}
{{- .Values.fullnameOverride | default $name | trunc 54 | trimSuffix "-" }}
{{- end }}

{{- define "kvasir.operatorName" -}}
{{ include "kvasir.fullname" . }}-operator
{{- end }}

{{- define "kvasir.serviceAccountName" -}}
{{- $made := ternary (include "kvasir.operatorName" .) "default" .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default $made }}
{{- end }}

{{- define "kvasir.gatewayName" -}}
{{ include "kvasir.fullname" . }}-gateway
{{- end }}

{{- define "kvasir.gatewayPeersName" -}}
{{ include "kvasir.fullname" . | trunc 49 | trimSuffix "-" }}-gateway-peers
{{- end }}

{{- define "kvasir.gatewayAccountName" -}}
{{- $made := ternary (include "kvasir.gatewayName" .) "default" .Values.gateway.serviceAccount.create }}
{{- .Values.gateway.serviceAccount.name | default $made }}
{{- end }}

{{/* The variable with which the gateway proves itself to engines, and from which the operator derives what they believe. */}}
{{- define "kvasir.gatewaySecretEnv" -}}
- name: KVASIR_GATEWAY_SECRET
  valueFrom: {secretKeyRef: {name: {{ .Values.gateway.existingSecret | default (include "kvasir.gatewayName" .) }}, key: secret}}
{{- end }}

{{/* Labels of every object; the chart's own win. */}}
{{- define "kvasir.labels" -}}
{{- $own := dict
      "app.kubernetes.io/name" .Chart.Name
      "app.kubernetes.io/instance" .Release.Name
      "app.kubernetes.io/version" .Chart.AppVersion
      "app.kubernetes.io/managed-by" .Release.Service
      "helm.sh/chart" (printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_")) }}
{{- mustMerge $own (.Values.commonLabels | default dict) | toYaml }}
{{- end }}

{{/* Name of the role that routers are bound to. */}}
{{- define "kvasir.routerRole" -}}
{{ include "kvasir.fullname" . }}-router
{{- end }}

{{/* The Leases that the operator must hold, by namespace and name, as a JSON list. */}}
{{- define "kvasir.leases" -}}
{{- $leases := list }}
{{- range .Values.watch.namespaces | default (list .Release.Namespace) }}
{{- $leases = append $leases (dict "namespace" . "name" "kvasir-operator") }}
{{- end }}
{{- if not .Values.watch.namespaces }}
{{- $leases = append $leases (dict "namespace" .Values.watch.clusterLeaseNamespace "name" "kvasir-operator-cluster-wide") }}
{{- end }}
{{- toJson $leases }}
{{- end }}

{{/* Ports by which Prometheus is reached, itself or by a proxy, as a JSON list. */}}
{{- define "kvasir.prometheusPorts" -}}
{{- $ports := .Values.networkPolicies.prometheusPorts | default list }}
{{- range compact (list .Values.prometheus.url .Values.proxy.httpProxy .Values.proxy.httpsProxy) }}
{{- $own := regexFind "[0-9]+$" (regexFind ":[0-9]+$" (urlParse .).host) }}
{{- $ports = append $ports (int ($own | default (ternary 443 80 (hasPrefix "https:" .)))) }}
{{- end }}
{{- toJson (uniq $ports) }}
{{- end }}

{{/* What holds for the objects of every InferenceService: the file of --pod-defaults. */}}
{{- define "kvasir.podDefaults" -}}
{{- with .Values.podDefaults }}{{ toYaml . }}{{ end }}
profiles:
  {{- toYaml (.Values.profiles | default dict) | nindent 2 }}
networkPeers:
  operator:
    namespaceLabels: {kubernetes.io/metadata.name: {{ .Release.Namespace }}}
    podLabels:
      {{- include "kvasir.selectorLabels" . | nindent 6 }}
  metrics:
    {{- toYaml (.Values.networkPolicies.metricsFrom | default list) | nindent 4 }}
podMonitors:
  labels:
    {{- toYaml (.Values.monitoring.labels | default dict) | nindent 4 }}
  {{- with .Values.monitoring.interval }}
  interval: {{ . }}
  {{- end }}
{{- if .Values.gateway.enabled }}
gateway:
  namespace: {{ .Release.Namespace }}
  name: {{ include "kvasir.gatewayName" . }}
  podLabels:
    {{- include "kvasir.gatewaySelectorLabels" . | nindent 4 }}
{{- end }}
{{- end }}

{{/* What selects the operator's pods; immutable in a Deployment. */}}
{{- define "kvasir.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{/* What selects the gateway's pods; immutable in a Deployment. */}}
{{- define "kvasir.gatewaySelectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{/* Topology spread constraints, counted by template, so that a rollout's old pods do not push the new ones together. Call with
(list CONSTRAINTS SELECTOR). */}}
{{- define "kvasir.spread" -}}
{{- $selector := index . 1 }}
{{- range index . 0 }}
{{- $counted := dict "labelSelector" (dict "matchLabels" $selector) "matchLabelKeys" (list "pod-template-hash") }}
{{ list (mustMerge (deepCopy .) $counted) | toYaml }}
{{- end }}
{{- end }}

{{/* Node labels that a pod of ours needs: an image of one architecture runs nowhere else. Call with (list $ LABELS). */}}
{{- define "kvasir.nodeSelector" -}}
{{- $root := index . 0 }}{{ $labels := deepCopy (index . 1 | default dict) }}
{{- $architectures := $root.Values.images.architectures }}
{{- if eq (len $architectures) 1 }}
{{- $labels = mustMerge $labels (dict "kubernetes.io/arch" (first $architectures)) }}
{{- end }}
{{- with $labels }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* Of the pod of `helm test`. */}}
{{- define "kvasir.testLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}

{{/* An image reference: call with (list $ .Values.images.NAME). */}}
{{- define "kvasir.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 }}
{{- $advice := "name the registry that holds kvasir-operator, kvasir-router and kvasir-runtime, for instance --set images.registry=ghcr.io/example" }}
{{- required (printf "images.registry is empty: %s (docs/install.md)" $advice) $root.Values.images.registry | trimSuffix "/" }}/
{{- $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* "yes" or nothing: whether a monitoring object is made. Call with (list $ ENABLED KIND). */}}
{{- define "kvasir.makes" -}}
{{- $root := index . 0 }}{{ $enabled := index . 1 | toString }}{{ $kind := index . 2 }}
{{- $known := $root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" $kind) }}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") $known) }}yes{{ end }}
{{- end }}

{{/* One alert with what its values say, as a list of one rule; of none where it is switched off. Call with
(list RULE .Values.monitoring.prometheusRule). */}}
{{- define "kvasir.alert" -}}
{{- $rule := index . 0 }}{{ $settings := index . 1 }}
{{- $alert := index ($settings.alerts | default dict) $rule.alert | default dict }}
{{- if $alert.enabled }}
{{- $annotations := dict }}
{{- with $settings.runbookUrl }}{{ $annotations = dict "runbook_url" (printf "%s#%s" . (lower $rule.alert)) }}{{ end }}
{{- $labels := merge (dict) ($alert.labels | default dict) ($settings.labels | default dict) }}
{{- $own := dict "for" ($alert.for | default "0s") "labels" $labels "annotations" $annotations }}
{{- list (merge (dict) $rule $own) | toYaml | replace "@threshold@" (toString $alert.threshold) }}
{{- end }}
{{- end }}

{{/* What must not exceed something else, where no schema can compare them. */}}
{{- define "kvasir.checkBounds" -}}
{{- include "kvasir.checkFlags" (list .Values.operator.extraArgs "operator.extraArgs" "retry-initial-seconds" "0.5" "retry-max-seconds" "30") }}
{{- include "kvasir.checkFlags" (list .Values.gateway.extraArgs "gateway.extraArgs" "max-body-size" "64Mi" "max-held-body-size" "256Mi") }}
{{- range $name, $pod := dict "operator" .Values.operator "gateway" .Values.gateway }}
{{- $resources := $pod.resources | default dict }}
{{- range $kind, $request := $resources.requests | default dict }}
{{- with get ($resources.limits | default dict) $kind }}
{{- include "kvasir.checkAmounts" (list (printf "%s.resources.requests.%s" $name $kind) $request (printf "limits.%s" $kind) .) }}
{{- end }}
{{- end }}
{{- end }}
{{- $defaults := .Values.podDefaults | default dict }}
{{- $groups := dict "podDefaults.engine" $defaults.engine "podDefaults.router" $defaults.router }}
{{- range $name, $profile := .Values.profiles }}{{ $_ := set $groups (printf "profiles.%s" $name) $profile }}{{ end }}
{{- range $name, $group := $groups }}
{{- $resources := ($group | default dict).resources | default dict }}
{{- if and (hasKey $resources "cpu") (hasKey $resources "cpuLimit") }}
{{- include "kvasir.checkAmounts" (list (printf "%s.resources.cpu" $name) $resources.cpu "cpuLimit" $resources.cpuLimit) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Call with (list FLAGS THEIR_VALUE NAME ITS_DEFAULT NAME_OF_THE_MOST ITS_DEFAULT). */}}
{{- define "kvasir.checkFlags" -}}
{{- $flags := index . 0 | default list }}
{{- $found := dict (index . 2) (index . 3) (index . 4) (index . 5) }}
{{- range $flag := $flags }}
{{- range $name := keys $found }}
{{- $start := printf "--%s=" $name }}
{{- if hasPrefix $start $flag }}{{ $_ := set $found $name (trimPrefix $start $flag) }}{{ end }}
{{- end }}
{{- end }}
{{- $name := printf "%s: --%s" (index . 1) (index . 2) }}
{{- include "kvasir.checkAmounts" (list $name (get $found (index . 2)) (printf "--%s" (index . 4)) (get $found (index . 4))) }}
{{- end }}

{{/* Call with (list NAME VALUE NAME_OF_THE_MOST VALUE). */}}
{{- define "kvasir.checkAmounts" -}}
{{- if gt (include "kvasir.amount" (index . 1) | float64) (include "kvasir.amount" (index . 3) | float64) }}
{{- fail (printf "%s %v is more than %s %v: lower it, or raise the other" (index . 0) (index . 1) (index . 2) (index . 3)) }}
{{- end }}
{{- end }}

{{/* A quantity as a plain number. */}}
{{- define "kvasir.amount" -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" (toString .) }}
{{- $factors := dict "" 1.0 "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 }}
{{- $factors = merge $factors (dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0) }}
{{- mulf (float64 $number) (get $factors (trimPrefix $number (toString .)) | default 1.0) }}
{{- end }}
