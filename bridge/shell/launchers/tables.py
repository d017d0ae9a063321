"""Tables of programs that start other programs: options that take arguments, and options that set numbers of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

PYTHON = re.compile(r"(pgi)?python[\d.]*$|pypy[\d.]*$|ipython$")
PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
SHELLS = ("bash", "sh", "dash", "zsh", "ksh", "ash")
TEXT_OPTION = re.compile(r"-\w*c\w*")
SHELL_VALUES = ("-o", "+o", "-O", "+O", "--rcfile", "--init-file")
ASSIGNMENT = re.compile(r"[A-Za-z_][\w%]*=")
NO_PYTHON = ("--no_python", "--no-python")
SCRIPT = (".sh", ".bash", ".slurm", ".sbatch")
TRAINER = re.compile(r".*\.py$|(llamafactory-cli|lmf|axolotl|swift|megatron)$")
"""Matches programs that train: scripts, and commands that a package installs."""


@dataclass(frozen=True)
class Starter:
    """A program that starts another program, named in its arguments.

    `values` are options with their numbers of arguments; `before` is the number of the program's
    own words before the command; `under` are the subcommands that start something (`docker run`).
    `sizes` are options that set ranks: `total`, `node` (ranks of a node), `nodes`, `hosts` (a file
    of nodes), `listed` (a list of devices). `own` marks a program that starts the ranks itself;
    `fallback` and `alone` are its defaults for ranks of a node and for nodes. `shell` says where a
    text for a shell is found: `rest` (all further words), or an option. `stdin` marks a program
    that reads a script from its input, `script` a program with a script as argument. With
    `assigns`, variables may be set before the command. With `module`, `-m` names the program. With
    `apart`, the started program has a new environment. `parser` says that `values` has all options of
    the program, whose parser is argparse: `exact`, or `short` if it takes the unique start of a long
    option for the option. With `dashes`, an option is also spelled with dashes in place of underscores.
    `devices` is the variable that lists the devices of a node where no option sets sizes.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    before: int = 0
    under: tuple[tuple[str, ...], ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    own: bool = False
    fallback: int | None = None
    alone: int | None = None
    shell: str = ""
    assigns: bool = False
    module: bool = False
    stdin: bool = False
    apart: bool = False
    script: bool = False
    parser: str = ""
    dashes: bool = False
    devices: str = ""

    @cached_property
    def spellings(self) -> Mapping[str, str]:
        """All spellings of the options, each with the option in `values`."""
        with_dashes = {name.replace("_", "-"): name for name in self.values}
        names = {name: name for name in self.values}
        return {**with_dashes, **names} if self.dashes else names

    def name_option(self, text: str) -> str | None:
        """Return the option of `values` that the program takes `text` (without a value) for; None for
        no option, or for the start of several spellings.
        """
        if text in self.spellings or self.parser != "short" or not text.startswith("--"):
            return self.spellings.get(text)
        options = [name for name in self.spellings if name.startswith(text)]
        return self.spellings[options[0]] if len(options) == 1 else None


def starter(
    values: str = "", before: int = 0, under: str = "", sizes: str = "", **more: bool | int | str
) -> Starter:
    """Return a row of `STARTERS`.

    `values` is written `-x --name*2`: options with their number of arguments, one by default.
    `under` is written `run|job submit`, `sizes` is written `total:-n,--ntasks nodes:-N`.
    """
    parts = (part.partition(":") for part in sizes.split())
    roles = {name: role for role, _, names in parts for name in names.split(",")}
    pairs = (word.partition("*") for word in values.split())
    # Options that set sizes have an argument, too.
    counts = {**{name: int(count or 1) for name, _, count in pairs}, **dict.fromkeys(roles, 1)}
    subcommands = tuple(tuple(words.split()) for words in under.split("|")) if under else ()
    return Starter(counts, before, subcommands, roles, **more)  # type: ignore[arg-type]


TORCHRUN = starter(
    "-h*0 --help*0 --rdzv_backend --rdzv_endpoint --rdzv_id --rdzv_conf --standalone*0 --max_restarts --monitor_interval "
    "--start_method --event_log_handler --role -m*0 --module*0 --no_python*0 --run_path*0 --log_dir -r --redirects -t --tee "
    "--local_ranks_filter --duplicate_stdout_filters --duplicate_stderr_filters --node_rank --master_addr --master_port "
    "--local_addr --logs_specs --numa_binding --signals_to_handle --shutdown_timeout --virtual_local_rank*0 --use_env*0",
    sizes="node:--nproc_per_node nodes:--nnodes",
    own=True,
    fallback=1,
    alone=1,
    module=True,
    parser="short",
    dashes=True,
)
"""torch/distributed/run.py, `get_args_parser`, and torch/distributed/launch.py, which adds `--use_env`."""
FAULT_TOLERANT = replace(
    TORCHRUN, values={**TORCHRUN.values, "--ft_param_workload_check_interval": 1}, parser=""
)
"""Launchers with torchrun's options and more of their own."""
DEEPSPEED = starter(
    "-h*0 --help*0 --min_elastic_nodes --max_elastic_nodes --elastic_training*0 --master_port --master_addr "
    "--node_rank --launcher --launcher_args --module*0 --no_python*0 --no_local_rank*0 --no_ssh*0 --no_ssh_check*0 "
    "--force_multi*0 --save_pid*0 --enable_each_rank_log --autotuning --bind_cores_to_rank*0 --bind_core_list --ssh_port "
    "--venv_script --log_level -q*0 --quiet*0",
    sizes="node:--num_gpus,--num_accelerators nodes:--num_nodes listed:--include,-i excluded:-e,--exclude hosts:-H,--hostfile",
    own=True,
    alone=1,
    module=True,
    parser="short",
    devices="CUDA_VISIBLE_DEVICES",
)
"""deepspeed/launcher/runner.py, `parse_args` and `main`."""
DEEPSPEED_NODE = starter(
    "-h*0 --help*0 --node_rank --master_addr --master_port --world_info --module*0 --no_python*0 --enable_elastic_training*0 "
    "--min_elastic_nodes --max_elastic_nodes --no_local_rank*0 --save_pid --enable_each_rank_log --bind_cores_to_rank*0 "
    "--bind_core_list --log_level -q*0 --quiet*0",
    own=True,
    alone=1,
    module=True,
    parser="short",
)
"""deepspeed/launcher/launch.py, `parse_args`."""
SLURM = starter(
    "-A -a -B -c -C -d -D -e -G -i -J -L -m -M -o -p -q -r -S -t -T -w -W -x --account --acctg-freq --bb --bbf --array --begin "
    "--clusters --cluster-constraint --comment --constraint --container --container-id --container-image --container-mounts "
    "--container-name --container-workdir --container-env --core-spec --cores-per-socket --cpu-bind --cpu-freq --cpus-per-gpu "
    "--cpus-per-task --chdir --deadline --delay-boot --dependency --distribution --epilog --error --exclude --export "
    "--export-file --extra-node-info --gid --gpu-bind --gpu-freq --gpus --gpus-per-socket --gpus-per-task --gres --gres-flags "
    "--hint --input --job-name --jobid --licenses --mail-type --mail-user --mcs-label --mem --mem-bind --mem-per-cpu "
    "--mem-per-gpu --mincpus --mpi --network --nodefile --nodelist --ntasks-per-core --ntasks-per-gpu --ntasks-per-socket "
    "--open-mode --output --partition --power --priority --profile --prolog --qos --relative --reservation --segment --signal "
    "--slurmd-debug --sockets-per-node --switches --task-epilog --task-prolog --thread-spec --threads --threads-per-core "
    "--time --time-min --tres-bind --tres-per-task --uid --wait --wckey --gpus-per-node --container-save -l*0 --label*0 -u*0 "
    "--unbuffered*0 --pty*0 --exclusive*0 --overlap*0 --kill-on-bad-exit*0 -K*0 -v*0 -Q*0 --contiguous*0 -s*0 "
    "--oversubscribe*0 -O*0 --overcommit*0 --no-kill*0 -k*0 -E*0 --preserve-env*0 --container-writable*0 "
    "--no-container-mount-home*0 --container-mount-home*0 --container-remap-root*0 --propagate*0 --requeue*0 --no-requeue*0 "
    "--parsable*0 -Z*0 --no-allocate*0",
    sizes="total:-n,--ntasks node:--ntasks-per-node nodes:-N,--nodes",
    own=True,
)
"""srun(1)."""
MPI = starter(
    "-x -H -host --host -hostfile --hostfile -machinefile --machinefile -f -mca*2 --mca*2 -gmca*2 --gmca*2 -genv*2 -env*2 "
    "--env -envlist -genvlist --genvlist -wdir --wdir -wd --wd -bind-to --bind-to -map-by --map-by -rank-by --rank-by -rf "
    "--rankfile -launcher -rmk -bootstrap -iface -prefix --prefix -output-filename --output-filename -oversubscribe*0 -hosts "
    "--hosts -path --path --cpu-bind -cpu-bind --depth -d --ppn-list -am --am -tune --tune -report-uri --report-uri --timeout "
    "-timeout --display -personality -configfile -cpu-set --cpu-set -slot-list --line-buffer*0 --mem-bind --rmap --gpu-bind "
    "--label*0 -print-rank-map*0 --display-map*0",
    sizes="total:-n,-np,--np,-c,--n node:-ppn,--ppn,-perhost,-npernode,--npernode,-N",
    own=True,
)
"""Open MPI's mpirun(1), Hydra's and PALS' mpiexec(1)."""
ACCELERATE = (
    "-h*0 --help*0 --config_file --quiet*0 -q*0 --cpu*0 --multi_gpu*0 --tpu*0 --mixed_precision --num_machines "
    "--num_cpu_threads_per_process --enable_cpu_affinity*0 --dynamo_backend --dynamo_mode --dynamo_use_fullgraph*0 "
    "--dynamo_use_dynamic*0 --dynamo_use_regional_compilation*0 --use_deepspeed*0 --use_fsdp*0 --use_parallelism_config*0 "
    "--use_megatron_lm*0 --gpu_ids --same_network*0 --machine_rank --main_process_ip --main_process_port -t --tee "
    "--log_dir --role --rdzv_backend --rdzv_conf --max_restarts --monitor_interval -m*0 --module*0 --no_python*0 "
    "--tpu_cluster*0 --no_tpu_cluster*0 --tpu_use_sudo*0 --vm --env --main_training_function --downcast_bf16*0 "
    "--deepspeed_config_file --zero_stage --offload_optimizer_device --offload_param_device --offload_optimizer_nvme_path "
    "--offload_param_nvme_path --gradient_accumulation_steps --gradient_clipping --zero3_init_flag "
    "--zero3_save_16bit_model --deepspeed_hostfile --deepspeed_exclusion_filter --deepspeed_inclusion_filter "
    "--deepspeed_multinode_launcher --deepspeed_moe_layer_cls_names --fsdp_version --fsdp_offload_params "
    "--fsdp_min_num_params --fsdp_sharding_strategy --fsdp_reshard_after_forward --fsdp_auto_wrap_policy "
    "--fsdp_transformer_layer_cls_to_wrap --fsdp_backward_prefetch --fsdp_state_dict_type --fsdp_forward_prefetch "
    "--fsdp_use_orig_params --fsdp_cpu_ram_efficient_loading --fsdp_sync_module_states --fsdp_activation_checkpointing "
    "--fsdp_activation_checkpointing_offload --megatron_lm_tp_degree --megatron_lm_use_custom_fsdp "
    "--megatron_lm_no_load_optim --megatron_lm_eod_mask_loss --megatron_lm_overlap_cpu_optimizer_d2h_h2d "
    "--megatron_lm_no_save_optim --megatron_lm_optimizer_cpu_offload --megatron_lm_use_precision_aware_optimizer "
    "--megatron_lm_decoder_last_pipeline_num_layers --megatron_lm_pp_degree --megatron_lm_num_micro_batches "
    "--megatron_lm_sequence_parallelism --megatron_lm_recompute_activations --megatron_lm_use_distributed_optimizer "
    "--megatron_lm_gradient_clipping --megatron_lm_recompute_granularity --megatron_lm_recompute_method "
    "--megatron_lm_recompute_num_layers --megatron_lm_attention_backend --megatron_lm_expert_model_parallel_size "
    "--megatron_lm_context_parallel_size --megatron_lm_attention_dropout --megatron_lm_hidden_dropout "
    "--megatron_lm_attention_softmax_in_fp32 --megatron_lm_expert_tensor_parallel_size "
    "--megatron_lm_calculate_per_token_loss --megatron_lm_use_rotary_position_embeddings --fp8_backend "
    "--fp8_use_autocast_during_eval*0 --fp8_margin --fp8_interval --fp8_format --fp8_amax_history_len "
    "--fp8_amax_compute_algo --fp8_override_linear_precision --fp8_opt_level --fp8_enable_fsdp_float8_all_gather "
    "--fp8_pad_inner_dim --aws_access_key_id --aws_secret_access_key --debug*0 --mpirun_hostfile "
    "--parallelism_config_dp_replicate_size --parallelism_config_dp_shard_size --parallelism_config_tp_size "
    "--parallelism_config_cp_size --parallelism_config_cp_backend --parallelism_config_cp_comm_strategy "
    "--parallelism_config_sp_size --parallelism_config_sp_backend --parallelism_config_sp_seq_length "
    "--parallelism_config_sp_seq_length_is_variable --parallelism_config_sp_attn_implementation --rdzv_endpoint "
    "--node_rank"
)
ACCELERATE_LAUNCH = starter(
    ACCELERATE, sizes="total:--num_processes", own=True, module=True, parser="exact", dashes=True
)
"""accelerate/commands/launch.py, `launch_command_parser`."""
DOCKER = (
    "-v --volume -e --env --env-file -w --workdir --name --gpus --shm-size --ipc --network --net --ulimit -u --user --mount -p "
    "--publish -h --hostname --entrypoint --cap-add --cap-drop --device --runtime --memory -m --cpus --cpuset-cpus --label -l "
    "--log-driver --log-opt --restart --security-opt --add-host --dns --expose --group-add --init*0 --pid --platform --pull "
    "--tmpfs --uts --userns --volumes-from --cidfile --detach-keys --health-cmd --ip --link --mac-address --oom-score-adj "
    "--rm*0 -i*0 -t*0 -d*0 -it*0 -ti*0 -itd*0 -dit*0 --privileged*0 --detach*0 --interactive*0 --tty*0 --read-only*0 -P*0 "
    "--pids-limit --stop-signal --stop-timeout --storage-opt --sysctl --blkio-weight --cgroup-parent --annotation"
)
SINGULARITY = (
    "-B --bind -H --home -W --workdir --pwd --cwd --env --env-file --overlay -o --scratch -S --network --network-args "
    "--hostname --add-caps --drop-caps --security --app --dns --fusemount --mount --apply-cgroups --pem-path --docker-login*0"
)

STARTERS: Mapping[str, Starter] = {
    # launchers of ranks
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), TORCHRUN),
    **dict.fromkeys(
        (
            "ft_launcher",
            "torchrun_hpu",
            "torch_run",
            "nvidia_resiliency_ext.fault_tolerance.launcher",
        ),
        FAULT_TOLERANT,
    ),
    **dict.fromkeys(("deepspeed", "ds", "deepspeed.launcher.runner", "deepspeed.pt"), DEEPSPEED),
    "deepspeed.launcher.launch": DEEPSPEED_NODE,
    **dict.fromkeys(("srun", "yhrun"), SLURM),
    **dict.fromkeys(
        (
            "mpirun",
            "mpiexec",
            "orterun",
            "prterun",
            "mpiexec.hydra",
            "mpirun.openmpi",
            "mpiexec.mpich",
        ),
        MPI,
    ),
    "mpirun_rsh": starter("-hostfile", sizes="total:-np,-n", own=True, assigns=True),
    "aprun": starter("-d -cc -e -L -B*0 -j -S -b*0 -r -m", sizes="total:-n node:-N", own=True),
    "jsrun": starter(
        "-g -c -b -d -l -E -h -U -p*1 --smpiargs --bind --launch_distribution --latency_priority",
        own=True,
    ),
    "flux": starter(
        "-c -g -o --env --setopt -t",
        under="run|submit|alloc",
        sizes="total:-n,--ntasks nodes:-N,--nodes",
        own=True,
    ),
    "ibrun": starter("-o", sizes="total:-n,-np", own=True),
    "horovodrun": starter(
        "-H --hosts --hostfile -p --ssh-port --start-timeout --network-interface",
        sizes="total:-np",
        own=True,
    ),
    **dict.fromkeys(
        ("accelerate", "accelerate.commands.accelerate_cli"),
        replace(ACCELERATE_LAUNCH, under=(("launch",),)),
    ),
    **dict.fromkeys(("accelerate-launch", "accelerate.commands.launch"), ACCELERATE_LAUNCH),
    "composer": starter(
        "--master_addr --master_port --node_rank --stdout --stderr",
        sizes="node:-n,--nproc total:--world_size",
    ),
    "colossalai": starter(
        "-H --host --hostfile --include --exclude --master_port --master_addr",
        under="run",
        sizes="node:--nproc_per_node nodes:--num_nodes",
        own=True,
        fallback=1,
        alone=1,
    ),
    "ezpz-launch": starter(),
    "ezpz.launch": starter(),
    "bsub": starter("-J -o -e -q -W -P -R -m -M -nnodes -alloc_flags -cn_cu -G -U -w", stdin=True),
    # batch systems and other machines
    "sbatch": starter(" ".join(SLURM.values), shell="--wrap", stdin=True, script=True),
    "salloc": starter(" ".join(SLURM.values)),
    "ray": starter(
        "--address --runtime-env --runtime-env-json --working-dir --submission-id --job-id --entrypoint-num-cpus "
        "--entrypoint-num-gpus --entrypoint-memory --entrypoint-resources --metadata-json --log-style --log-color --headers "
        "--verify",
        under="job submit",
    ),
    "ssh": starter(
        "-b -c -D -E -e -F -I -i -J -L -l -m -O -o -p -Q -R -S -W -w -B",
        before=1,
        shell="rest",
        stdin=True,
        apart=True,
    ),
    "rsh": starter("-l", before=1, shell="rest", apart=True),
    "pdsh": starter("-w -x -l -t -u -f -R -g -X", shell="rest", apart=True),
    "dsh": starter("-m -g -f -r", shell="rest", apart=True),
    "clush": starter("-w -x -g -X -l -f -t -u -o", shell="rest", apart=True),
    "pssh": starter("-h -H -l -p -o -e -t -O -x", shell="rest", apart=True),
    "parallel-ssh": starter("-h -H -l -p -o -e -t -O -x", shell="rest", apart=True),
    "kubectl": starter(
        "-n --namespace -c --container --context -it*0 -i*0 -t*0",
        before=1,
        under="exec",
        apart=True,
    ),
    # environments
    "uv": starter(
        "--with --extra --group --python -p --project --directory --index --index-url --env-file --with-requirements "
        "--with-editable --package --no-group --only-group --only-extra --no-extra --color --link-mode --cache-dir "
        "--config-file",
        under="run",
        module=True,
    ),
    "uvx": starter("--from --with --python -p"),
    "poetry": starter("-C --directory -P --project", under="run"),
    **dict.fromkeys(("pdm", "pipenv", "rye"), starter("-p --project", under="run")),
    "hatch": starter("-e --env -p --project", under="run|env run"),
    **dict.fromkeys(
        ("conda", "mamba", "micromamba"),
        starter("-n --name -p --prefix --cwd -a --attach -e --env", under="run"),
    ),
    "pixi": starter(
        "-e --environment --manifest-path --concurrent-downloads --color -p --platform", under="run"
    ),
    "docker": starter(DOCKER, before=1, under="run|exec|container run|container exec", apart=True),
    **dict.fromkeys(
        ("podman", "nerdctl", "nvidia-docker"),
        starter(DOCKER, before=1, under="run|exec", apart=True),
    ),
    **dict.fromkeys(("singularity", "apptainer"), starter(SINGULARITY, before=1, under="exec|run")),
    "enroot": starter("-e --env -m --mount -c --conf", before=1, under="start|exec"),
    "shifter": starter("--image --module -V --volume -m -i -e --env --env-file --workdir -w"),
    # wrappers of one process
    **dict.fromkeys(
        ("nohup", "setsid", "unbuffer", "catchsegv", "builtin", "xvfb-run", "command", "coproc"),
        starter(),
    ),
    "exec": starter("-a"),
    "time": starter("-o --output -f --format"),
    "nice": starter("-n --adjustment"),
    "ionice": starter("-c --class -n --classdata -p --pid"),
    "stdbuf": starter("-i --input -o --output -e --error"),
    "env": starter("-u --unset -C --chdir -S --split-string", assigns=True),
    "sudo": starter(
        "-u --user -g --group -h --host -p --prompt -C -D --chdir -R -r -t -T -U", assigns=True
    ),
    "timeout": starter(
        "-k --kill-after -s --signal --foreground*0 --preserve-status*0 -v*0 --verbose*0", before=1
    ),
    "numactl": starter(
        "-m --membind -N --cpunodebind -C --physcpubind -i --interleave -p --preferred -P -w -b*0 -a*0 -l*0"
    ),
    "taskset": starter("-c*0 --cpu-list*0 -p*0 -a*0", before=1),
    "chrt": starter("-T -P -D", before=1),
    "flock": starter("-w --timeout -E", before=1, shell="-c"),
    "nsys": starter(
        "-t --trace -o --output -s --sample -c --capture-range --capture-range-end -e --env-var -w --show-output -d --duration "
        "-y --delay -f --force-overwrite -x --stop-on-exit --kill --gpu-metrics-device --gpu-metrics-devices "
        "--cuda-memory-usage --cuda-graph-trace --python-backtrace --backtrace --cudabacktrace --stats --session-new --export",
        under="profile|launch",
    ),
    "ncu": starter(
        "-o --export -k --kernel-name -c --launch-count -s --launch-skip --set --section --target-processes --nvtx-include"
    ),
    "rocprof": starter("-i -o -d -t"),
    "rocprofv3": starter("-i -o -d"),
    "perf": starter("-o -e -F -g*0", under="record|stat"),
    "py-spy": starter("-o --output -f --format -r --rate -d --duration", under="record"),
    "strace": starter("-o -e -s -p -P -E -u -I"),
    "gdb": starter("-ex -x -iex -ix -d -cd"),
    "valgrind": starter(),
    "coverage": starter(
        "--rcfile --source --data-file --omit --include --context", under="run", module=True
    ),
    "script": starter("-O -I -B -T -E -m -o", shell="-c"),
    "su": starter("-s -g -G", before=1, shell="-c"),
    "watch": starter("-n --interval", shell="rest"),
    "screen": starter("-S -t -s -c -h -L*0 -Logfile -d*0 -m*0 -dm*0 -dmS"),
    "tmux": starter(
        "-s -n -t -c -e -x -y -F -L -S",
        under="new-session|new|new-window|neww|split-window",
        shell="rest",
    ),
    "xargs": starter(
        "-a -d -E -I -i*0 -L -n -P -s --arg-file --max-args --max-procs --replace --delimiter"
    ),
}
"""All programs that start another program, by file name."""

LAUNCHERS = frozenset(name for name, row in STARTERS.items() if row.own)
"""Launchers of ranks. Their names count as programs even after words that are not in the table."""

_TEXT_ONLY = (
    "echo printf cat grep egrep fgrep rg sed awk gawk ls cp mv rm rmdir mkdir ln chmod chown touch head tail tee wc sort "
    "uniq cut tr kill pkill killall pgrep ps pip pip3 pipx apt apt-get yum dnf apk brew git wget curl tar unzip zip gzip "
    "gunzip scp rsync aws gsutil azcopy test [ [[ which whereis type hash man vi vim nano emacs code open diff cmp du df "
    "date hostname nvidia-smi rocm-smi module ml spack alias unalias declare typeset local export readonly set unset shopt "
    "let read mapfile readarray trap ulimit umask wait sleep return exit break continue cd pushd popd dirname basename "
    "realpath readlink seq jq yq make cmake ninja gcc g++ nvcc huggingface-cli hf wandb modelscope tensorboard pytest "
    "parallel tox nox black ruff flake8 isort mypy pre-commit sha256sum md5sum stat file find xxd lsof fuser true false : "
    "logger notify-send yes expr bc source . getopts shift jobs fg bg disown dos2unix patch column rev tac nl less more "
    "locale ldconfig mount umount systemctl service crontab at"
)
TEXT_ONLY = frozenset(_TEXT_ONLY.split())
"""Programs that start no other program, even if their arguments name one."""

DIRECTIVE = re.compile(r"^#SBATCH\s+--?(?P<name>[\w-]+)[=\s]\s*(?P<value>\w+)", re.MULTILINE)
JOB_LINE = re.compile(r"^#SBATCH\s", re.MULTILINE)
"""Matches a line by which a script shows that Slurm starts it, and sets variables in its environment."""
BATCH_SYSTEM: Mapping[str, tuple[str, ...]] = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
"""Options of `#SBATCH` lines, each with the variables that Slurm sets from it."""
