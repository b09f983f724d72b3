#!lua flags=allow-oom
-- The request has been carried out, or cannot be. ARGV: trainer, id. A newer request stays.
require_trainer(ARGV[1])
if call('HGET', K.meta, 'rollback_id') == ARGV[2] then call('HDEL', K.meta, 'rollback_id', 'rollback_version') end
return 1
