{{/* What the operator may do with services and their children, where it serves them. Plain YAML: a test reads it. */}}
{{- define "kvasir.serviceRules" -}}
- apiGroups: [serving.kvasir.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
- apiGroups: [serving.kvasir.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
# Asked for where owners are checked (OpenShift), because children name their service as an owner that waits for them.
- apiGroups: [serving.kvasir.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# A service's own is asked for by its name and made once; none is listed, changed or deleted.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
# To the one role of routers only, by the right to bind it (rbac.yaml).
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# Those of a group are deleted together where one of them fails.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- end }}

{{/* What the operator may do in the namespaces of its Leases, which it makes anew should somebody delete them. */}}
{{- define "kvasir.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [kvasir-operator, kvasir-operator-cluster-wide]
  verbs: [get, update]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
{{- end }}

{{/* What routers may do in the namespace of their service. */}}
{{- define "kvasir.routerRules" -}}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end }}

{{/* What the gateway may do in the namespaces whose services it serves. */}}
{{- define "kvasir.gatewayRules" -}}
- apiGroups: [serving.kvasir.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end }}

{{/* What an operator of single namespaces may do in the gateway's: see whether it is ready, and ask its pods what they hold for
services at zero. */}}
{{- define "kvasir.gatewayLookRules" -}}
- apiGroups: [apps]
  resources: [deployments]
  resourceNames: [{{ include "kvasir.gatewayName" . }}]
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
{{- end }}
