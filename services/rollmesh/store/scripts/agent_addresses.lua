#!lua flags=no-writes,allow-oom
-- Returns the addresses of the processes that have sessions of agents.
local addresses = {}
for _, session in ipairs(call('ZRANGE', K.sessions, now(), '+inf', 'BYSCORE', 'LIMIT', 0, 512)) do
  local address = call('HGET', session_key(session), 'address')
  if address and address ~= '' then addresses[#addresses + 1] = address end
end
return addresses
