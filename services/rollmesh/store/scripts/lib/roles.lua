local function require_leader(token)
  if call('HGET', K.meta, 'leader') ~= token then
    fail('SESSION_LOST', 'leadership has passed to another replica')
  end
end

local function require_trainer(token)
  if call('HGET', K.meta, 'trainer') ~= token then
    fail('SESSION_LOST', 'a newer trainer session is open')
  end
end

local function require_session(token)
  if not call('ZSCORE', K.sessions, token) then
    fail('SESSION_LOST', 'worker session is closed or was reaped')
  end
end
