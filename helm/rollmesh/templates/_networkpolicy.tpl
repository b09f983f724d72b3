{{/* Who may call whom. Pods of a component are reached by the named components alone, and on the admin port by
     monitoring. Probes come from the node, which network plugins let through. */}}

{{- define "rollmesh.networkPolicyHead" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "rollmesh.componentName" . | quote }}
  labels:
    {{- include "rollmesh.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "rollmesh.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* A rule for calls of our own pods: (list $ (list "rollout" "agents") $port). */}}
{{- define "rollmesh.ingressFrom" -}}
{{- $root := index . 0 -}}
- from:
    {{- range index . 1 }}
    {{- if or (ne . "agents") (include "rollmesh.enabled" (list $root .)) }}
    - podSelector:
        matchLabels:
          {{- include "rollmesh.selectorLabels" (list $root .) | nindent 10 }}
    {{- end }}
    {{- end }}
  {{- with index . 2 }}
  ports:
    - {port: {{ . }}, protocol: TCP}
  {{- end }}
{{- end -}}

{{/* A rule for Prometheus. */}}
{{- define "rollmesh.ingressFromMonitoring" -}}
- from:
    {{- toYaml .Values.networkPolicy.monitoringFrom | nindent 4 }}
  ports:
    - {port: {{ .Values.network.adminPort }}, protocol: TCP}
{{- end -}}
