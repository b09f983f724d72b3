#!lua flags=allow-oom
-- ARGV: trainer, train step of the newest committed trainer state.
require_trainer(ARGV[1])
if tonumber(ARGV[2]) > tonumber(call('HGET', K.meta, 'committed_step')) then
  call('HSET', K.meta, 'committed_step', ARGV[2])
end
return 1
