{{/* Services that score what rollout workers send them, over gRPC: reward services, and a teacher for each name. */}}

{{/* Components of the teachers that the chart deploys, those of the run file without an address, separated by spaces. The
     values of each, its own over those of all teachers, are then at its component, as a service's are. */}}
{{- define "rollmesh.teachers" -}}
{{- $values := .Values -}}
{{- $components := list -}}
{{- range $name, $teacher := (include "rollmesh.run" . | fromYaml).teachers -}}
{{- if not $teacher.address -}}
{{- $component := printf "teacher-%s" $name -}}
{{- $own := get $values.teachers $name | default dict -}}
{{- $_ := set $values $component (mergeOverwrite (deepCopy $values.teacher) $own) -}}
{{- $components = append $components $component -}}
{{- end -}}
{{- end -}}
{{- join " " $components -}}
{{- end -}}

{{/* Address for rollout workers: (list $ "teacher-math"). */}}
{{- define "rollmesh.scoringAddress" -}}
{{- printf "%s:%v" (include "rollmesh.componentName" .) (index . 0).Values.network.grpcPort -}}
{{- end -}}

{{/* Every object of a scoring service, whose values are at its component: (list $ "reward" $arguments $egress). */}}
{{- define "rollmesh.scoring" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $here := list $root $component -}}
{{- $values := index $root.Values $component -}}
{{- /* No Redis credentials and no checkpoints here: verifiers run what a model wrote. */ -}}
{{- $uses := list -}}
{{ include "rollmesh.workload" (list $root "Deployment" $component $values.replicas) }}
  strategy:
    rollingUpdate: {maxUnavailable: 1, maxSurge: 1}
  template:
    metadata:
      labels:
        {{- include "rollmesh.podLabels" $here | nindent 8 }}
      annotations:
        {{- include "rollmesh.podAnnotations" $here | nindent 8 }}
    spec:
      {{- include "rollmesh.podSettings" $here | nindent 6 }}
      # SIGTERM lets the service finish its answers: no preStop hook is needed.
      terminationGracePeriodSeconds: {{ include "rollmesh.gracePeriodSeconds" $root }}
      initContainers:
        {{- include "rollmesh.validateContainer" (append $here $uses) | nindent 8 }}
      containers:
        - name: {{ $component | splitList "-" | first }}
          image: {{ include "rollmesh.image" (list $root $values.image) | quote }}
          imagePullPolicy: {{ $values.image.pullPolicy | quote }}
          args: {{ index . 2 | toJson }}
          env:
            {{- include "rollmesh.env" $here | nindent 12 }}
            {{- with $values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            {{- include "rollmesh.ports" (list $root "grpc" "admin") | trim | nindent 12 }}
          {{- include "rollmesh.probes" (append $here "grpc") | nindent 10 }}
          {{- include "rollmesh.containerSecurityContext" $root | nindent 10 }}
          resources:
            {{- toYaml $values.resources | nindent 12 }}
          volumeMounts:
            {{- include "rollmesh.volumeMounts" (append $here $uses) | nindent 12 }}
      volumes:
        {{- include "rollmesh.volumes" (append $here $uses) | nindent 8 }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ include "rollmesh.componentName" $here | quote }}
  labels:
    {{- include "rollmesh.labels" $here | nindent 4 }}
spec:
  # Headless: rollout workers resolve all addresses and send each answer to the least busy service.
  clusterIP: None
  selector:
    {{- include "rollmesh.selectorLabels" $here | nindent 4 }}
  ports:
    - name: grpc
      port: {{ $root.Values.network.grpcPort }}
      targetPort: grpc
      appProtocol: grpc
---
{{ include "rollmesh.serviceAccount" $here }}
{{- if eq $values.autoscaling.kind "hpa" }}
---
{{ include "rollmesh.horizontalPodAutoscaler" $here }}
{{- else if eq $values.autoscaling.kind "keda" }}
---
{{ include "rollmesh.scaledObject" $here }}
{{- end }}
{{- if $values.podDisruptionBudget.enabled }}
---
{{ include "rollmesh.podDisruptionBudget" $here }}
{{- end }}
{{- if $root.Values.networkPolicy.enabled }}
---
{{ include "rollmesh.networkPolicyHead" $here }}
  ingress:
    {{- include "rollmesh.ingressFrom" (list $root (list "rollout" "agents") $root.Values.network.grpcPort) | nindent 4 }}
    {{- include "rollmesh.ingressFromMonitoring" $root | nindent 4 }}
  {{- if gt (len .) 3 }}
  policyTypes: [Ingress, Egress]
  egress:
    {{- toYaml (index . 3) | nindent 4 }}
  {{- else }}
  policyTypes: [Ingress]
  {{- end }}
{{- end }}
{{- end -}}
