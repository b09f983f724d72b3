{{/* What all workloads with replicas begin with, and how many replicas an upgrade gives them. */}}

{{/* From apiVersion to the replicas: (list $ "Deployment" "generator" 2). */}}
{{- define "rollmesh.workload" -}}
{{- $root := index . 0 -}}
{{- $kind := index . 1 -}}
{{- $component := index . 2 -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") }}
kind: {{ $kind }}
metadata:
  name: {{ include "rollmesh.componentName" (list $root $component) | quote }}
  labels:
    {{- include "rollmesh.workloadLabels" (list $root $component) | nindent 4 }}
  annotations:
    # The value; an upgrade that changes it wins over a number that someone has scaled to.
    rollmesh/replicas: {{ index . 3 | int | quote }}
spec:
  {{- with include "rollmesh.replicas" . }}
  replicas: {{ . }}
  {{- end }}
  {{- if ne $kind "LeaderWorkerSet" }}
  selector:
    matchLabels:
      {{- include "rollmesh.selectorLabels" (list $root $component) | nindent 6 }}
  {{- end }}
{{- end -}}

{{/* Labels of a workload, not of its pods: (list $ "trainer"). */}}
{{- define "rollmesh.workloadLabels" -}}
{{ include "rollmesh.labels" . }}
{{- with (index (index . 0).Values (index . 1)).labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Replicas of a workload: those of the cluster, which an autoscaler or `kubectl scale` has set, unless the value has
     changed. An equal number is no conflict with whoever set it, and a manifest without the field would make the API set
     it to 1. Empty for an autoscaler's first number: (list $ "Deployment" "generator" 2). */}}
{{- define "rollmesh.replicas" -}}
{{- $root := index . 0 -}}
{{- $kind := index . 1 -}}
{{- $component := index . 2 -}}
{{- $value := index . 3 | int -}}
{{- $scaled := dig "autoscaling" "kind" "" (index $root.Values $component) -}}
{{- $api := ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") -}}
{{- /* Empty at the first install, and in tools that render without a cluster. */ -}}
{{- $live := lookup $api $kind $root.Release.Namespace (include "rollmesh.componentName" (list $root $component)) -}}
{{- $before := dig "metadata" "annotations" "rollmesh/replicas" (toString $value) ($live | default dict) -}}
{{- if and $live (or $scaled (eq $before (toString $value))) -}}
{{- int $live.spec.replicas -}}
{{- else if not $scaled -}}
{{- $value -}}
{{- end -}}
{{- end -}}
