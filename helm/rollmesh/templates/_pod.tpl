{{/* Parts that the pods of all components share. Each component's own file has the rest. */}}

{{/* Pod-level settings: (list $ "rollout"). */}}
{{- define "rollmesh.podSettings" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index $root.Values $component -}}
serviceAccountName: {{ include "rollmesh.componentName" (list $root $component) | quote }}
automountServiceAccountToken: {{ $values.automountServiceAccountToken }}
# A Service named rollmesh-* would put ROLLMESH_*_PORT variables here, which read like fields of the run file.
enableServiceLinks: false
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $index, $spread := $values.topologySpread }}
{{- if eq $index 0 }}
topologySpreadConstraints:
{{- end }}
  - topologyKey: {{ $spread.topologyKey | quote }}
    maxSkew: {{ $spread.maxSkew }}
    whenUnsatisfiable: {{ $spread.whenUnsatisfiable | quote }}
    labelSelector:
      matchLabels:
        {{- include "rollmesh.selectorLabels" (list $root $component) | nindent 8 }}
{{- end }}
{{- end -}}

{{/* A checksum that restarts pods when the run file changes. */}}
{{- define "rollmesh.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
rollmesh/run-file: {{ include "rollmesh.runFile" $root | sha256sum | quote }}
{{- with $values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rollmesh.containerSecurityContext" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: ["ALL"]
{{- end -}}

{{/* Environment of every service: identity, listening addresses, run folder, and the settings that the run file is
     checked with, also where a service does not use them; no secrets: (list $ "rollout"). */}}
{{- define "rollmesh.env" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
- name: ROLLMESH_NETWORK__INSTANCE
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: ROLLMESH_NETWORK__ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: ROLLMESH_NETWORK__HOST
  value: {{ $root.Values.network.bindHost | quote }}
- name: ROLLMESH_NETWORK__GRPC_PORT
  value: {{ $root.Values.network.grpcPort | quote }}
- name: ROLLMESH_NETWORK__ADMIN_PORT
  value: {{ $root.Values.network.adminPort | quote }}
- name: ROLLMESH_NETWORK__SHARED_FOLDER
  value: "false"
- name: ROLLMESH_FOLDER
  value: {{ include "rollmesh.runFolder" . | quote }}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: HOME
  value: /tmp
- name: ROLLMESH_STORE__URL
  value: {{ include "rollmesh.redisUrl" $root | quote }}
{{- if $root.Values.redis.tlsSecret }}
- name: ROLLMESH_STORE__TLS__CA
  value: /etc/rollmesh/redis-tls/ca.crt
{{- if $root.Values.redis.clientCertificate }}
- name: ROLLMESH_STORE__TLS__CERTIFICATE
  value: /etc/rollmesh/redis-tls/tls.crt
- name: ROLLMESH_STORE__TLS__KEY
  value: /etc/rollmesh/redis-tls/tls.key
{{- end }}
{{- end }}
- name: ROLLMESH_CHECKPOINTS__FOLDER
  value: {{ include "rollmesh.checkpointFolder" $root | quote }}
{{- if $root.Values.checkpoints.url }}
- name: ROLLMESH_CHECKPOINTS__CACHE_FOLDER
  value: /var/cache/rollmesh
{{- end }}
{{- if $root.Values.security.tls.enabled }}
- name: ROLLMESH_SECURITY__TLS__CERTIFICATE
  value: /etc/rollmesh/tls/tls.crt
- name: ROLLMESH_SECURITY__TLS__KEY
  value: /etc/rollmesh/tls/tls.key
- name: ROLLMESH_SECURITY__TLS__CA
  value: /etc/rollmesh/tls/ca.crt
- name: ROLLMESH_SECURITY__TLS__SERVER_NAME
  value: {{ $root.Values.security.tls.serverName | quote }}
{{- end }}
{{- if $root.Values.security.token.enabled }}
- name: ROLLMESH_SECURITY__TOKEN_FILE
  value: /etc/rollmesh/token/token
{{- end }}
{{- end -}}

{{/* Passwords of services that use the queue. */}}
{{- define "rollmesh.storeEnv" -}}
{{- if include "rollmesh.redisHasPassword" . }}
- name: ROLLMESH_STORE__PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "rollmesh.secretName" . | quote }}
      key: {{ .Values.secrets.keys.redisPassword | quote }}
{{- end }}
{{- if .Values.redis.externalSentinelPassword }}
- name: ROLLMESH_STORE__SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "rollmesh.secretName" . | quote }}
      key: {{ .Values.secrets.keys.sentinelPassword | quote }}
{{- end }}
{{- end -}}

{{/* The key of services that read or write checkpoints. */}}
{{- define "rollmesh.checkpointEnv" -}}
- name: ROLLMESH_CHECKPOINTS__SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "rollmesh.secretName" . | quote }}
      key: {{ .Values.secrets.keys.checkpointSecret | quote }}
{{- end -}}

{{/* Environment of services that call the reward service. */}}
{{- define "rollmesh.rewardEnv" -}}
- name: ROLLMESH_REWARD__ADDRESS
  value: {{ include "rollmesh.scoringAddress" (list . "reward") | quote }}
{{- end -}}

{{- define "rollmesh.ports" -}}
{{- $root := index . 0 -}}
{{- range $index, $port := rest . }}
{{- if eq . "grpc" }}
- name: grpc
  containerPort: {{ $root.Values.network.grpcPort }}
{{- else if eq . "admin" }}
- name: admin
  containerPort: {{ $root.Values.network.adminPort }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Run folder of a component. The records of the trainer outlive its pod where there is a shared volume, and the
     gateway reads them there: (list $ "trainer"). */}}
{{- define "rollmesh.runFolder" -}}
{{- $root := index . 0 -}}
{{- if and (has (index . 1) (list "trainer" "gateway")) (not $root.Values.checkpoints.url) -}}
{{- printf "/var/lib/rollmesh/shared/%s/run" (include "rollmesh.runName" $root) -}}
{{- else -}}
/var/lib/rollmesh/run
{{- end -}}
{{- end -}}

{{/* Volumes: (list $ "trainer" (list "checkpoints" "store")); the last item lists the further uses of the component. */}}
{{- define "rollmesh.volumes" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $uses := index . 2 -}}
{{- $values := index $root.Values $component -}}
- name: run-file
  configMap:
    name: {{ include "rollmesh.configMapName" $root | quote }}
- name: run-folder
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- if has "checkpoints" $uses }}
{{- if $root.Values.checkpoints.url }}
- name: policy-cache
  {{- toYaml (default (dict "emptyDir" dict) $root.Values.checkpoints.cacheVolume) | nindent 2 }}
{{- else }}
- name: shared
  persistentVolumeClaim:
    claimName: {{ include "rollmesh.checkpointClaim" $root | quote }}
{{- end }}
{{- end }}
{{- if and (has "store" $uses) $root.Values.redis.tlsSecret }}
- name: redis-tls
  secret:
    secretName: {{ $root.Values.redis.tlsSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- if $root.Values.security.tls.enabled }}
- name: tls
  secret:
    secretName: {{ default (printf "%s-tls" (include "rollmesh.componentName" (list $root $component))) $root.Values.security.tls.existingSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- if $root.Values.security.token.enabled }}
- name: token
  secret:
    secretName: {{ include "rollmesh.secretName" $root | quote }}
    defaultMode: 0440
    items: [{key: {{ $root.Values.secrets.keys.meshToken | quote }}, path: token}]
{{- end }}
{{- with $root.Values.model.existingClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ . | quote }}
    readOnly: true
{{- end }}
{{- with $root.Values.data.existingClaim }}
- name: data
  persistentVolumeClaim:
    claimName: {{ . | quote }}
    readOnly: true
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rollmesh.volumeMounts" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $uses := index . 2 -}}
{{- $values := index $root.Values $component -}}
- name: run-file
  mountPath: /etc/rollmesh/run
  readOnly: true
- name: run-folder
  mountPath: /var/lib/rollmesh/run
- name: tmp
  mountPath: /tmp
{{- if has "checkpoints" $uses }}
{{- if $root.Values.checkpoints.url }}
- name: policy-cache
  mountPath: /var/cache/rollmesh
{{- else }}
- name: shared
  mountPath: /var/lib/rollmesh/shared
  {{- if eq $component "generator" }}
  # It loads policies; only the trainer and the gateway write here.
  readOnly: true
  {{- end }}
{{- end }}
{{- end }}
{{- if and (has "store" $uses) $root.Values.redis.tlsSecret }}
- name: redis-tls
  mountPath: /etc/rollmesh/redis-tls
  readOnly: true
{{- end }}
{{- if $root.Values.security.tls.enabled }}
- name: tls
  mountPath: /etc/rollmesh/tls
  readOnly: true
{{- end }}
{{- if $root.Values.security.token.enabled }}
- name: token
  mountPath: /etc/rollmesh/token
  readOnly: true
{{- end }}
{{- if $root.Values.model.existingClaim }}
- name: model
  mountPath: {{ $root.Values.model.mountPath | quote }}
  readOnly: true
{{- end }}
{{- if $root.Values.data.existingClaim }}
- name: data
  mountPath: {{ $root.Values.data.mountPath | quote }}
  readOnly: true
{{- end }}
{{- with $values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The init container that refuses a wrong run file, with the message of the service: (list $ "rollout" $uses). */}}
{{- define "rollmesh.validateContainer" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index $root.Values $component -}}
- name: validate
  image: {{ include "rollmesh.image" (list $root $values.image) | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy | quote }}
  args: ["config", "validate", "/etc/rollmesh/run/run.yaml"]
  env:
    {{- include "rollmesh.env" (list $root $component) | nindent 4 }}
  {{- include "rollmesh.containerSecurityContext" $root | nindent 2 }}
  {{- with $values.validateResources | default $root.Values.validateResources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    {{- include "rollmesh.volumeMounts" . | nindent 4 }}
{{- end -}}

{{/* Probes of a service. Liveness is the admin port's, which checks every loop; a model may take long to load, so
     nothing is judged before the startup probe has passed. A kubelet's gRPC probe speaks no TLS, so with certificates
     readiness is asked of the admin port as well: (list $ "generator" "grpc" | "http"). torchrun waits up to 600 s for
     one of several trainer pods that is replaced, and no rank of the others answers meanwhile. */}}
{{- define "rollmesh.probes" -}}
{{- $root := index . 0 -}}
{{- $probes := (index $root.Values (index . 1)).probes -}}
{{- $tls := $root.Values.security.tls.enabled -}}
{{- $scheme := ternary "HTTPS" "HTTP" $tls -}}
{{- $waits := and (eq (index . 1) "trainer") (gt (int $root.Values.trainer.nodes) 1) -}}
{{- $waitFailures := ternary (divf 600 ($probes.periodSeconds | default 10) | ceil) 0 $waits | int -}}
startupProbe:
  httpGet: {path: /healthz, port: admin, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add $probes.startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /healthz, port: admin, scheme: {{ $scheme }}}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ add $probes.livenessFailures $waitFailures }}
readinessProbe:
  {{- if and (eq (index . 2) "grpc") (not $tls) }}
  grpc: {port: {{ $root.Values.network.grpcPort }}}
  {{- else }}
  httpGet: {path: /readyz, port: admin, scheme: {{ $scheme }}}
  {{- end }}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: 2
{{- end -}}
