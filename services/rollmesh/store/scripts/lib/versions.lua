local train_steps = {}
local function train_step_of(version)
  local step = train_steps[version]
  if step == nil then
    step = tonumber(call('HGET', K.versions, version))
    if not step then
      fail(recovering() and 'RECOVERING' or 'CONFLICT', 'policy version ' .. version .. ' has not been announced')
    end
    train_steps[version] = step
  end
  return step
end
