-- The folder name of a policy ends with r<count> after the first rollback (PolicyRecord.rollback_count).
local function rollback_count(path)
  return tonumber(string.match(path, 'r(%d+)$') or '0')
end

-- Policies before a rollback, or before a second policy of their train step, are an abandoned branch: no trajectory may
-- start on them. The train steps alone do not tell: the steps before a rollback may have been trained without a policy.
local function add_policy(version, train_step, path, digest)
  local newest = call('XREVRANGE', K.policies, '+', '-', 'COUNT', 1)[1]
  if newest then
    local _, _, _, newest_step, _, newest_path = unpack(newest[2])
    if tonumber(train_step) <= tonumber(newest_step) or rollback_count(path) > rollback_count(newest_path) then
      call('HSET', K.meta, 'branch_version', version)
    end
  end
  call('XADD', K.policies, (tonumber(version) + 1) .. '-0', 'version', version, 'train_step', train_step,
    'path', path, 'digest', digest)
  call('HSET', K.versions, version, train_step)
  call('HSET', K.meta, 'policy_version', version, 'policy_train_step', train_step)
end
