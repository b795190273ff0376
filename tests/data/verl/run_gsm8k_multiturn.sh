# Starts a run with 8 GPUs of one host.
set -x
PROJECT_DIR="${PROJECT_DIR:-.}"
LR=1e-6

python3 -m verl.trainer.main_ppo \
    --config-path="$PROJECT_DIR" \
    --config-name='multiturn_options' \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.actor.optim.lr=$LR \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/gsm8k_tool_config.yaml" \
    +actor_rollout_ref.rollout.multi_turn.format=hermes \
    algorithm.use_kl_in_reward=False \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 \
    trainer.test_freq=20 \
    trainer.save_freq=-1 \
    data.train_files=$PROJECT_DIR/gsm8k_rows.json \
    trainer.total_epochs=15 $@
