{{/* What the operator may do with services and their children, where it serves them. Plain YAML: a test reads it. */}}
{{- define "kvasir.serviceRules" -}}
- apiGroups: [serving.kvasir.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [serving.kvasir.dev]
  resources: [inferenceservices/status]
  verbs: [get, patch]
# Asked for where owners are checked (OpenShift), because children name their service as an owner that waits for them.
- apiGroups: [serving.kvasir.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch, delete]
# A service's own is asked for by its name and made once; none is listed, changed or deleted.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
# Held by the operator only so that it may hand it to routers.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- end }}

{{/* What the operator may do in the namespace of its Lease. */}}
{{- define "kvasir.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
{{- end }}
