#!/bin/bash
#SBATCH --job-name=milesbatch-tiny
#SBATCH --time=60
#SBATCH --chdir=/home/me/project
#SBATCH --output=/scratch/me/runs/tiny/logs/slurm-run-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --comment=mark:run
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --account=abc@h100
#SBATCH --constraint=h100
#SBATCH --qos=qos_gpu_h100-t3
#SBATCH --hint=nomultithread

trap '' USR1
module purge
module load arch/h100
source $WORK/milesbatch/bin/activate

exec /venv/bin/python -u -m milesbatch.jobs.control /scratch/me/runs/tiny --cause 'by hand: `submit`'
