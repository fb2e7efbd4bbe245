#!/bin/bash
#SBATCH --job-name=milesbatch-tiny
#SBATCH --time=60
#SBATCH --chdir=/home/me/project
#SBATCH --output=/scratch/me/runs/tiny/logs/slurm-run-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --comment=mark:run
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --account=abc@h100
#SBATCH --constraint=[rack1|rack2]
#SBATCH --exclude=n[1-3],n7
#SBATCH --partition=gpu,gpu2
#SBATCH --qos=long
#SBATCH --reservation=maintenance
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=1
#SBATCH --mem=10G
#SBATCH --account=abc@h100
#SBATCH --constraint=a100&ib
#SBATCH --partition=idle
#SBATCH --qos=long
#SBATCH --exclude=
#SBATCH --reservation=

trap '' USR1

exec /venv/bin/python -u -m milesbatch.jobs.control /scratch/me/runs/tiny --cause 'by hand: `submit`'
