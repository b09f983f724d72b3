{{/* The pod of a generator, for its Deployment, StatefulSet and LeaderWorkerSet: (list $ "StatefulSet"). */}}
{{- define "rollmesh.generatorPod" -}}
{{- $root := index . 0 -}}
{{- $kind := index . 1 -}}
{{- $uses := list "store" "checkpoints" -}}
{{- $generator := $root.Values.generator -}}
{{- $sidecar := eq (include "rollmesh.sglangPlace" $root) "sidecar" -}}
metadata:
  labels:
    {{- include "rollmesh.podLabels" (list $root "generator") | nindent 4 }}
  annotations:
    {{- include "rollmesh.podAnnotations" (list $root "generator") | nindent 4 }}
spec:
  {{- include "rollmesh.podSettings" (list $root "generator") | nindent 2 }}
  # SIGTERM removes the generator from the registry and ends its streams as interrupted, with every token delivered;
  # an SGLang beside it is stopped last. No preStop hook is needed.
  terminationGracePeriodSeconds: {{ add (include "rollmesh.gracePeriodSeconds" $root) (ternary 15 0 $sidecar) }}
  initContainers:
    {{- include "rollmesh.validateContainer" (list $root "generator" $uses) | nindent 4 }}
    {{- if $sidecar }}
    - name: sglang
      restartPolicy: Always
      {{- include "rollmesh.sglangServer" (list $root $kind "leader") | nindent 6 }}
    {{- end }}
  containers:
    - name: generator
      image: {{ include "rollmesh.image" (list $root $generator.image) | quote }}
      imagePullPolicy: {{ $generator.image.pullPolicy | quote }}
      {{- if eq $kind "StatefulSet" }}
      args: ["generator", "/etc/rollmesh/run/run.yaml", "--index", "$(POD_INDEX)"]
      {{- else }}
      args: ["generator", "/etc/rollmesh/run/run.yaml"]
      {{- end }}
      env:
        {{- if eq $kind "StatefulSet" }}
        - name: POD_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
        {{- end }}
        {{- include "rollmesh.env" (list $root "generator") | nindent 8 }}
        {{- include "rollmesh.storeEnv" $root | nindent 8 }}
        {{- include "rollmesh.checkpointEnv" $root | nindent 8 }}
        {{- if $sidecar }}
        - name: ROLLMESH_GENERATOR__SGLANG__URL
          value: {{ printf "http://127.0.0.1:%v" $generator.sglang.sidecar.port | quote }}
        - name: ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY
          {{- include "rollmesh.sglangKey" $root | nindent 10 }}
        {{- end }}
        {{- with $generator.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- include "rollmesh.ports" (list $root "grpc" "admin") | trim | nindent 8 }}
      {{- include "rollmesh.probes" (list $root "generator" "grpc") | nindent 6 }}
      {{- include "rollmesh.containerSecurityContext" $root | nindent 6 }}
      resources:
        {{- toYaml $generator.resources | nindent 8 }}
      volumeMounts:
        {{- include "rollmesh.volumeMounts" (list $root "generator" $uses) | nindent 8 }}
        {{- if and $generator.sharedMemory (not $sidecar) }}
        - name: shared-memory
          mountPath: /dev/shm
        {{- end }}
  volumes:
    {{- include "rollmesh.generatorVolumes" (list $root $uses) | nindent 4 }}
{{- end -}}

{{- define "rollmesh.generatorVolumes" -}}
{{- $root := index . 0 -}}
{{- include "rollmesh.volumes" (list $root "generator" (index . 1)) }}
{{- with $root.Values.generator.sharedMemory }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ . | quote }}}
{{- end }}
{{- end -}}
