#!/bin/bash
#SBATCH --job-name=milesbatch-tiny-rollout
#SBATCH --time=60
#SBATCH --chdir=/home/me/project
#SBATCH --output=/scratch/me/runs/tiny/logs/slurm-rollout-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --comment=mark:rollout
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=1
#SBATCH --mem=10G
#SBATCH --account=abc@h100
#SBATCH --constraint=a100&ib
#SBATCH --partition=idle
#SBATCH --qos=long

trap '' USR1

exec /venv/bin/python -u -m milesbatch.jobs.control /scratch/me/runs/tiny --cause 'by hand: `submit`'
