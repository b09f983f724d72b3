#!lua flags=allow-oom
-- Restores settings that a client has read and Redis has lost. A setting stays when Redis has the same or a higher number.
-- A version that the trainer has not announced again yet cannot be pinned or rolled back to: the client retries.
-- ARGV: (name, number, value) each. Returns the number of written settings.
local written = 0
for at = 1, #ARGV, 3 do
  local name, number, value = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  local version = (name == 'pin' or name == 'rollback') and string.match(value, '%d+$')
  if number > setting_number(name) and (not version or call('HEXISTS', K.versions, version) == 1) then
    write_setting(name, number, value)
    written = written + 1
  end
end
return written
