#!lua flags=allow-oom
-- Removes a rollback request that was completed or rejected; a newer request stays. ARGV: trainer, id.
-- Returns the number of the setting, 0 when it stays.
require_trainer(ARGV[1])
if call('HGET', K.meta, 'rollback_id') ~= ARGV[2] then return 0 end
return new_setting('rollback', '')
