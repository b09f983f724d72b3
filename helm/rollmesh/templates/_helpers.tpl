{{/* Names, labels and images. */}}

{{- define "rollmesh.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters: Kubernetes appends up to 22 for pods, and names of Services end at 63. */}}
{{- define "rollmesh.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "rollmesh.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of an object of a component: (list $ "rollout"). */}}
{{- define "rollmesh.componentName" -}}
{{- printf "%s-%s" (include "rollmesh.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{/* Selector of the pods of a component; it never changes: (list $ "rollout"). */}}
{{- define "rollmesh.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "rollmesh.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 | quote }}
{{- end -}}

{{/* Labels of every object: (list $ "rollout"). */}}
{{- define "rollmesh.labels" -}}
{{- $root := index . 0 -}}
{{ include "rollmesh.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* Labels of the pods of a component. The run becomes the label `run` of its metrics: (list $ "rollout"). */}}
{{- define "rollmesh.podLabels" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
{{ include "rollmesh.labels" . }}
rollmesh/run: {{ include "rollmesh.runName" $root | quote }}
{{- with $values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whether a component is deployed: (list $ "agents"). A run of outside agents needs the agents service. */}}
{{- define "rollmesh.enabled" -}}
{{- $root := index . 0 -}}
{{- $run := include "rollmesh.run" $root | fromYaml -}}
{{- $needed := and (eq (index . 1) "agents") (eq (dig "rollout" "program" "" $run) "agent") -}}
{{- if or (index $root.Values (index . 1)).enabled $needed -}}true{{- end -}}
{{- end -}}

{{/* Image of a component; a digest wins over the tag: (list $ $root.Values.rollout.image). */}}
{{- define "rollmesh.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $repository := $image.repository -}}
{{- with $root.Values.imageRegistry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with passwords and keys: an existing one, or the one of templates/secrets/secret.yaml. */}}
{{- define "rollmesh.secretName" -}}
{{- if .Values.secrets.existingSecret -}}
{{- .Values.secrets.existingSecret -}}
{{- else if .Values.secrets.create -}}
{{- include "rollmesh.componentName" (list . "secrets") -}}
{{- else -}}
{{- fail "secrets.existingSecret is empty: set secrets.create=true, or create a Secret with the keys named under secrets.keys, for example\n  kubectl create secret generic rollmesh --from-literal=redis-password=... --from-literal=checkpoint-secret=...\nand set secrets.existingSecret=rollmesh" -}}
{{- end -}}
{{- end -}}

{{- define "rollmesh.configMapName" -}}
{{- printf "%s-run" (include "rollmesh.fullname" .) -}}
{{- end -}}

{{/* The URL of Redis, without a password. */}}
{{- define "rollmesh.redisUrl" -}}
{{- if .Values.redis.enabled -}}
{{- printf "redis://%s:6379/0" (include "rollmesh.componentName" (list . "redis")) -}}
{{- else -}}
{{- required "redis.externalUrl is empty: give one, or set redis.enabled=true" .Values.redis.externalUrl -}}
{{- end -}}
{{- end -}}

{{/* "true" if Redis requires a password. */}}
{{- define "rollmesh.redisHasPassword" -}}
{{- if or .Values.redis.enabled .Values.redis.externalPassword -}}true{{- end -}}
{{- end -}}

{{/* Location of the checkpoints: a folder of the mounted claim, or the URL of an object store. */}}
{{- define "rollmesh.checkpointFolder" -}}
{{- if .Values.checkpoints.url -}}
{{- printf "%s/%s" (trimSuffix "/" .Values.checkpoints.url) (include "rollmesh.runName" .) -}}
{{- else -}}
{{- printf "/var/lib/rollmesh/shared/%s/checkpoints" (include "rollmesh.runName" .) -}}
{{- end -}}
{{- end -}}

{{- define "rollmesh.checkpointClaim" -}}
{{- default (include "rollmesh.componentName" (list . "checkpoints")) .Values.checkpoints.existingClaim -}}
{{- end -}}

{{/* Seconds for the shutdown of a service: the drain time of the run file, 5 s of the process, 10 s of Kubernetes. */}}
{{- define "rollmesh.gracePeriodSeconds" -}}
{{- $drain := dig "generator" "drain_timeout_seconds" 20 (include "rollmesh.run" . | fromYaml) -}}
{{- add (ceil $drain | int) 15 -}}
{{- end -}}

{{/* Place of the SGLang servers: "sidecar", "child", or empty without SGLang. */}}
{{- define "rollmesh.sglangPlace" -}}
{{- if eq (dig "generator" "engine" "torch" (include "rollmesh.run" . | fromYaml)) "sglang" -}}
{{- ternary "sidecar" "child" .Values.generator.sglang.sidecar.enabled -}}
{{- end -}}
{{- end -}}

{{/* The fields of the run: the values', or the demo's when there are none. They are never mixed. */}}
{{- define "rollmesh.run" -}}
{{- $run := .Values.run | default (.Files.Get "files/demo-run.yaml" | fromYaml) -}}
{{- range list "name" "model" -}}
{{- if not (hasKey $run .) -}}
{{- fail (printf "run.%s is missing: a run with any field is a whole run file, to which the chart adds no field of the demo. Give run.%s, or for the demo with other values add --values examples/kubernetes/countdown-cpu-values.yaml" . .) -}}
{{- end -}}
{{- end -}}
{{- toYaml $run -}}
{{- end -}}

{{- define "rollmesh.runName" -}}
{{- (include "rollmesh.run" . | fromYaml).name -}}
{{- end -}}

{{/* The run file. Pod-specific fields and secrets come from the environment, which overrides it. */}}
{{- define "rollmesh.runFile" -}}
{{- $run := merge (dict "folder" "/var/lib/rollmesh/run") (include "rollmesh.run" . | fromYaml) -}}
{{- range include "rollmesh.teachers" . | splitList " " | compact -}}
{{- $_ := set (index $run.teachers (trimPrefix "teacher-" .)) "address" (include "rollmesh.scoringAddress" (list $ .)) -}}
{{- end -}}
{{- toYaml $run -}}
{{- end -}}

{{/* A ServiceAccount; its token is mounted by the pods whose values say so: (list $ "rollout"). */}}
{{- define "rollmesh.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "rollmesh.componentName" . | quote }}
  labels:
    {{- include "rollmesh.labels" . | nindent 4 }}
  {{- with (index (index . 0).Values (index . 1)).serviceAccountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end -}}

{{/* (list $ "rollout"). */}}
{{- define "rollmesh.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "rollmesh.componentName" . | quote }}
  labels:
    {{- include "rollmesh.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ (index (index . 0).Values (index . 1)).podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "rollmesh.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* redis.conf of the server in the chart; the pod restarts when it changes. */}}
{{- define "rollmesh.redisConfig" -}}
dir /data
port 6379
bind * -::*
protected-mode no
appendonly yes
appendfsync {{ .Values.redis.appendfsync }}
save ""
maxmemory {{ .Values.redis.maxmemory }}
maxmemory-policy noeviction
{{- with .Values.redis.extraConfig }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Shell command that prints a secret of the environment without line breaks, which editors and echo add to a file, as
     the services read it. */}}
{{- define "rollmesh.oneLine" -}}
printf %s "${{ . }}" | tr -d '\r\n'
{{- end -}}

{{/* Probe: Redis answers PING, with the password from the environment. */}}
{{- define "rollmesh.redisProbe" -}}
{{- $password := include "rollmesh.oneLine" "REDIS_PASSWORD" -}}
{{- list "sh" "-c" (printf "[ \"$(REDISCLI_AUTH=$(%s) redis-cli ping)\" = PONG ]" $password) | toJson -}}
{{- end -}}

{{/* Credentials of Prometheus on the admin ports. */}}
{{- define "rollmesh.scrapeSecurity" -}}
{{- $tls := .Values.security.tls -}}
{{- if $tls.enabled }}
{{- $secret := required "monitoring with security.tls needs monitoring.tlsSecret: a Secret with tls.crt, tls.key and ca.crt for Prometheus" .Values.monitoring.tlsSecret }}
scheme: https
tlsConfig:
  serverName: {{ $tls.serverName | quote }}
  ca: {secret: {name: {{ $secret | quote }}, key: ca.crt}}
  cert: {secret: {name: {{ $secret | quote }}, key: tls.crt}}
  keySecret: {name: {{ $secret | quote }}, key: tls.key}
{{- else }}
scheme: http
{{- end }}
{{- if .Values.security.token.enabled }}
authorization:
  type: Bearer
  credentials: {name: {{ include "rollmesh.secretName" . | quote }}, key: {{ .Values.secrets.keys.meshToken | quote }}}
{{- end }}
{{- end -}}

{{/* The rules and dashboards of this chart identify targets by the labels run and service. */}}
{{- define "rollmesh.scrapeLabels" -}}
relabelings:
  - {sourceLabels: [__meta_kubernetes_pod_label_rollmesh_run], targetLabel: run}
  - {sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_component], targetLabel: service}
{{- end -}}
