#!lua flags=allow-oom
-- The request has been carried out, or cannot be. ARGV: trainer, id. A newer request stays.
-- Returns the number of the setting, 0 when it stays.
require_trainer(ARGV[1])
if call('HGET', K.meta, 'rollback_id') ~= ARGV[2] then return 0 end
return new_setting('rollback', '')
