#!/bin/bash
#SBATCH --job-name=milesbatch-tiny-rollout
#SBATCH --time=60
#SBATCH --chdir=/home/me/project
#SBATCH --output=/scratch/me/runs/tiny/logs/slurm-rollout-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --comment=mark:rollout
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --gres=gpu:4
#SBATCH --mem=320G
#SBATCH --account=kempner_mylab_lab
#SBATCH --constraint=h100
#SBATCH --exclude=holygpu1
#SBATCH --partition=kempner_requeue

trap '' USR1
module load python

exec /venv/bin/python -u -m milesbatch.jobs.control /scratch/me/runs/tiny --cause 'by hand: `submit`'
