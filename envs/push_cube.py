"""PushCube: a planar end effector pushes a damped cube to a goal.

The effector is a disc that follows a velocity command. The cube is a square that slides and turns with heavy damping:
where the disc enters it, the overlap is pushed out along the contact normal, shared between sliding and turning as a
quasi-static pusher does. The episode ends in success when the cube's centre is within 0.1 m of the goal, in failure
when the cube leaves the table, and by the clock after 100 steps of 0.04 s.

The reward is progress, 10 * (distance before - distance after), plus 10 for success, a little for being near the point
behind the cube and a small price on jerk. A Gaussian of the distance in place of progress pays more for waiting beside
the goal than for finishing, and policies find that out after a few hundred thousand steps.
"""

import math

import gymnasium as gym
import torch

from envs.embedded import EmbeddedEnv, paint, pixels

TABLE, HALF, RADIUS = 1.0, 0.05, 0.03  # m: half the table's side, half the cube's side, the effector's radius
REACH, DT = 0.1, 0.04  # m: success; s: a step
LEVER = 0.038  # m: radius of gyration of the cube's contact patch: how much of an off-centre push turns it
COAST = 0.2  # part of the cube's velocity left after a step


def length(vector: torch.Tensor) -> torch.Tensor:
    return torch.hypot(vector[:, 0], vector[:, 1])


class Env(EmbeddedEnv):
    max_episode_steps = 100
    # effector x, y; cube x, y; goal x, y; cube angle
    start = [(-0.9, 0.1), (-0.8, 0.1), (-0.6, 0.4), (-0.4, 0.4), (0.0, 0.6), (0.0, 0.6), (0.0, math.pi / 2)]
    single_action_space = gym.spaces.Box(-1.0, 1.0, (2,))

    def initial(self, draws):
        effector, cube, goal, angle = draws[:, 0:2], draws[:, 2:4], draws[:, 4:6], draws[:, 6]
        # A start that already succeeds, or nearly, is not a task: such a goal moves away from the cube.
        offset = goal - cube
        goal = cube + offset * (2 * REACH / length(offset)).clamp(min=1.0)[:, None]
        zero = torch.zeros_like(cube)
        return {"effector": effector, "cube": cube, "angle": angle, "velocity": zero, "goal": goal, "action": zero}

    def physics(self, state, action):
        effector = (state["effector"] + DT * action).clamp(-TABLE, TABLE)
        slid = state["cube"] + COAST * DT * state["velocity"]
        angle = state["angle"]

        # The disc's centre in the cube's frame, and the point of the square nearest to it.
        cos, sin = angle.cos(), angle.sin()
        dx, dy = (effector - slid).unbind(1)
        x, y = dx * cos + dy * sin, dy * cos - dx * sin
        near_x, near_y = x.clamp(-HALF, HALF), y.clamp(-HALF, HALF)
        gap_x, gap_y = x - near_x, y - near_y
        gap = torch.hypot(gap_x, gap_y)
        # The contact normal points from the square to the disc; a centre inside leaves through the nearest side.
        inside, depth_x, depth_y = gap < 1e-6, HALF - x.abs(), HALF - y.abs()
        by_x = depth_x < depth_y
        normal_x = torch.where(inside, x.sign() * by_x, gap_x / gap)
        normal_y = torch.where(inside, y.sign() * ~by_x, gap_y / gap)
        overlap = torch.where(inside, RADIUS + torch.minimum(depth_x, depth_y), RADIUS - gap).clamp(min=0.0)
        # Part of the push slides the cube, part of it turns it, the more the further off its centre it acts.
        arm = near_x * normal_y - near_y * normal_x
        push = -overlap / (1.0 + (arm / LEVER) ** 2)
        shift = torch.stack([normal_x * cos - normal_y * sin, normal_x * sin + normal_y * cos], 1)
        cube = slid + push[:, None] * shift
        angle = angle + push * arm / LEVER**2
        velocity = (cube - state["cube"]) / DT

        to_goal = state["goal"] - cube
        before, after = length(state["goal"] - state["cube"]), length(to_goal)
        behind = cube - to_goal * ((HALF + RADIUS) / after)[:, None]
        success = after < REACH
        failure = (cube.abs() > TABLE).any(1)
        near = 1.0 - torch.tanh(2.0 * length(effector - behind))
        reward = 10.0 * (before - after + success) + 0.03 * near - 0.01 * length(action - state["action"])
        moved = {"effector": effector, "cube": cube, "angle": angle, "velocity": velocity, "action": action}
        return state | moved, reward, success, failure, {"distance": after}

    def observe(self, state):
        effector, cube, goal = state["effector"], state["cube"], state["goal"]
        turn = 4 * state["angle"][:, None]  # a square looks the same after a quarter turn, and so does its observation
        parts = [effector, cube, goal, cube - effector, goal - cube, turn.cos(), turn.sin()]
        return {"state": torch.cat([*parts, state["velocity"], state["action"]], 1)}

    def render(self):
        count = self.render_rows
        state = {k: v[:count, None, None] for k, v in self._state.items()}
        points = pixels(128, -TABLE, TABLE, self.device)
        image = torch.full((count, 128, 128, 3), 0.92, device=self.device)
        goal = (points - state["goal"]).norm(dim=-1)
        image = paint(image, goal < REACH, (0.72, 0.88, 0.72))
        image = paint(image, (goal < REACH) & (goal > REACH - 0.02), (0.25, 0.6, 0.3))
        offset, cos, sin = points - state["cube"], state["angle"].cos(), state["angle"].sin()
        x, y = offset[..., 0] * cos + offset[..., 1] * sin, offset[..., 1] * cos - offset[..., 0] * sin
        image = paint(image, (x.abs() < HALF) & (y.abs() < HALF), (0.85, 0.35, 0.2))
        image = paint(image, (points - state["effector"]).norm(dim=-1) < RADIUS, (0.15, 0.3, 0.6))
        image[:, :, -1] = 0.6  # a line between the pictures of a video
        return (image * 255).to(torch.uint8)
