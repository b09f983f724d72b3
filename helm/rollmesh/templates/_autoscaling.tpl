{{/* Autoscalers. Their rules are in files/autoscaling; that of teacher.yaml is for every teacher by itself. */}}

{{- define "rollmesh.scalingRule" -}}
{{- $file := printf "files/autoscaling/%s.yaml" (index . 1 | splitList "-" | first) -}}
{{- required (printf "%s is missing in the chart" $file) ((index . 0).Files.Get $file) -}}
{{- end -}}

{{/* The scaled workload: (list $ "generator"). */}}
{{- define "rollmesh.scaleTarget" -}}
apiVersion: apps/v1
kind: {{ dig "kind" "Deployment" (index (index . 0).Values (index . 1)) }}
name: {{ include "rollmesh.componentName" . | quote }}
{{- end -}}

{{/* (list $ "generator"). */}}
{{- define "rollmesh.horizontalPodAutoscaler" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $scaling := (index $root.Values $component).autoscaling -}}
{{- $rule := include "rollmesh.scalingRule" . | fromYaml -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "rollmesh.componentName" . | quote }}
  labels:
    {{- include "rollmesh.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    {{- include "rollmesh.scaleTarget" . | nindent 4 }}
  minReplicas: {{ default $rule.minReplicas $scaling.minReplicas }}
  maxReplicas: {{ default $rule.maxReplicas $scaling.maxReplicas }}
  metrics:
    {{- range $rule.signals }}
    - type: External
      external:
        metric:
          # Made by prometheus-adapter from files/prometheus-adapter/rules.yaml.
          name: {{ include "rollmesh.signalMetric" (list $component .name) | quote }}
          selector:
            matchLabels:
              run: {{ include "rollmesh.runName" $root | quote }}
              {{- if hasPrefix "teacher-" $component }}
              teacher: {{ trimPrefix "teacher-" $component | quote }}
              {{- end }}
        target:
          type: {{ .metricType }}
          {{ ternary "averageValue" "value" (eq .metricType "AverageValue") }}: {{ include "rollmesh.quantity" .target | quote }}
    {{- end }}
  behavior:
    {{- toYaml (default $rule.behavior $scaling.behavior) | nindent 4 }}
{{- end -}}

{{- define "rollmesh.signalMetric" -}}
{{- printf "rollmesh_%s_%s" (index . 0 | splitList "-" | first) (index . 1) | replace "-" "_" -}}
{{- end -}}

{{/* A number as a Kubernetes quantity: 0.2 is 200m. */}}
{{- define "rollmesh.quantity" -}}
{{- printf "%.0fm" (mulf . 1000.0) -}}
{{- end -}}

{{/* (list $ "generator"). */}}
{{- define "rollmesh.scaledObject" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $scaling := (index $root.Values $component).autoscaling -}}
{{- $rule := include "rollmesh.scalingRule" . | fromYaml -}}
{{- $selector := printf "namespace=%q,run=%q" $root.Release.Namespace (include "rollmesh.runName" $root) -}}
{{- if hasPrefix "teacher-" $component -}}
{{- $selector = printf "%s,teacher=%q" $selector (trimPrefix "teacher-" $component) -}}
{{- end -}}
{{- $keda := $root.Values.keda -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "rollmesh.componentName" . | quote }}
  labels:
    {{- include "rollmesh.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    {{- include "rollmesh.scaleTarget" . | nindent 4 }}
  pollingInterval: {{ $keda.pollingIntervalSeconds }}
  minReplicaCount: {{ default $rule.minReplicas $scaling.minReplicas }}
  maxReplicaCount: {{ default $rule.maxReplicas $scaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml (default $rule.behavior $scaling.behavior) | nindent 8 }}
  triggers:
    {{- range $rule.signals }}
    - type: prometheus
      name: {{ .name | quote }}
      metricType: {{ .metricType }}
      metadata:
        serverAddress: {{ required "keda.prometheusAddress is empty" $keda.prometheusAddress | quote }}
        # Missing data is not zero: an unreachable Prometheus scales nothing down.
        ignoreNullValues: "false"
        threshold: {{ .target | quote }}
        query: {{ .query | replace "$selector" $selector | replace "$window" $rule.window | quote }}
      {{- with $keda.authenticationRef }}
      authenticationRef:
        name: {{ . | quote }}
      {{- end }}
    {{- end }}
{{- end -}}
