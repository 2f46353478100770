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

{{/* Labels of every object; the chart's own win. */}}
{{- define "kvasir.labels" -}}
{{- $own := dict
      "app.kubernetes.io/name" .Chart.Name
      "app.kubernetes.io/instance" .Release.Name
      "app.kubernetes.io/version" .Chart.AppVersion
      "app.kubernetes.io/managed-by" .Release.Service
      "helm.sh/chart" (printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_")) }}
{{- mustMerge $own .Values.commonLabels | toYaml }}
{{- end }}

{{/* What selects the operator's pods; immutable in a Deployment. */}}
{{- define "kvasir.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{/* An image reference: call with (list $ .Values.images.NAME). */}}
{{- define "kvasir.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 }}
{{- with $root.Values.images.registry }}{{ . | trimSuffix "/" }}/{{ end }}
{{- $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* "yes" or nothing: whether a monitoring object is made. Call with (list $ ENABLED KIND). */}}
{{- define "kvasir.makes" -}}
{{- $root := index . 0 }}{{ $enabled := index . 1 | toString }}{{ $kind := index . 2 }}
{{- $known := $root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" $kind) }}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") $known) }}yes{{ end }}
{{- end }}

{{/* The annotation runbook_url of an alert, if there is one. Call with (list $ ALERT). */}}
{{- define "kvasir.runbook" -}}
{{- with (index . 0).Values.monitoring.prometheusRule.runbookUrl -}}
runbook_url: {{ . }}#{{ index $ 1 | lower }}
{{- end }}
{{- end }}
