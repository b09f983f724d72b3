#!lua flags=allow-oom
-- ARGV: trainer. A run without a trainer does not wait for one in a recovery.
if call('HGET', K.meta, 'trainer') == ARGV[1] then call('HDEL', K.meta, 'trainer', 'trainer_name') end
return 1
