#!lua flags=allow-oom
-- Records the newest committed trainer state. ARGV: trainer, train step.
require_trainer(ARGV[1])
if tonumber(ARGV[2]) > tonumber(call('HGET', K.meta, 'committed_step')) then
  call('HSET', K.meta, 'committed_step', ARGV[2])
end
return 1
