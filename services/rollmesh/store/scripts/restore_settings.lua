#!lua flags=allow-oom
-- Settings that a client has seen and Redis has forgotten. One that Redis knows as new, or newer, stays. A version that the
-- trainer has not announced again yet cannot be pinned or gone back to: the client asks again.
-- ARGV: (name, number, value) each. Returns how many were written.
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
