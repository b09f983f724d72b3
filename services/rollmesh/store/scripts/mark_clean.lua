#!lua flags=allow-oom
-- The server is about to be stopped in order, after its clients: its next start is not a recovery.
call('HSET', K.meta, 'clean', '1')
return 1
