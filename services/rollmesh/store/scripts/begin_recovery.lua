#!lua flags=allow-oom
-- Opens a recovery when the server is a new one. Returns (recovering, run_id).
return {recovering() and 1 or 0, call('HGET', K.meta, 'run_id')}
