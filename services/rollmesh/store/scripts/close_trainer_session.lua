#!lua flags=allow-oom
-- Closes a trainer session; a recovery does not wait for a trainer without a session. ARGV: trainer.
if call('HGET', K.meta, 'trainer') == ARGV[1] then call('HDEL', K.meta, 'trainer', 'trainer_name') end
return 1
