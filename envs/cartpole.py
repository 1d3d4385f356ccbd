"""CartPole with a continuous force: keep the pole up for 500 steps of 0.02 s, on a rail of 4.8 m with stops.

The reward is (1 - |angle| / pi) - 0.005 * |angular velocity| a step. The episode fails when the pole passes the
horizontal; it succeeds when the clock ends it with the pole within 12 degrees of upright.
"""

import gymnasium as gym
import torch

from envs.embedded import EmbeddedEnv, paint, pixels

GRAVITY, CART, POLE, HALF_LENGTH, FORCE = 9.81, 1.0, 0.1, 0.5, 10.0  # m/s², kg, kg, m, N
RAIL, UPRIGHT, DT = 2.4, 0.2, 0.02  # m, rad, s


class Env(EmbeddedEnv):
    max_episode_steps = 500
    start = [(0.0, 1.0), (0.0, 0.5), (0.0, 0.5), (0.0, 0.5)]  # x, x', angle, angle'
    single_action_space = gym.spaces.Box(-1.0, 1.0, (1,))

    def initial(self, draws):
        return {"q": draws}

    def physics(self, state, action):
        x, x_dot, angle, angle_dot = state["q"].unbind(1)
        sin, cos = angle.sin(), angle.cos()
        total = CART + POLE
        push = (FORCE * action[:, 0] + POLE * HALF_LENGTH * angle_dot**2 * sin) / total
        angle_acc = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE * cos**2 / total))
        x_acc = push - POLE * HALF_LENGTH * angle_acc * cos / total
        x_dot, angle_dot = x_dot + DT * x_acc, angle_dot + DT * angle_acc
        x, angle = x + DT * x_dot, angle + DT * angle_dot
        x_dot = torch.where(x.abs() < RAIL, x_dot, 0.0)  # the cart stops at the ends of its rail
        x = x.clamp(-RAIL, RAIL)
        failure = angle.abs() > torch.pi / 2
        reward = (1.0 - angle.abs() / torch.pi) - 0.005 * angle_dot.abs()
        state = {"q": torch.stack([x, x_dot, angle, angle_dot], 1)}
        return state, reward, torch.zeros_like(failure), failure, {"angle": angle.abs()}

    def survived(self, state):
        return state["q"][:, 2].abs() < UPRIGHT

    def observe(self, state):
        x, x_dot, angle, angle_dot = state["q"].unbind(1)
        return {"state": torch.stack([x, x_dot, angle.sin(), angle.cos(), angle_dot], 1)}

    def render(self):
        count = self.render_rows
        x, _, angle, _ = self._state["q"][:count, :, None, None].unbind(1)
        points = pixels(128, -RAIL - 0.1, RAIL + 0.1, self.device).expand(count, -1, -1, -1)
        image = torch.full((count, 128, 128, 3), 0.92, device=self.device)
        px, py = points[..., 0] - x, points[..., 1]
        image = paint(image, (py + 0.1).abs() < 0.03, (0.6, 0.6, 0.6))
        image = paint(image, (px.abs() < 0.3) & (py.abs() < 0.15), (0.15, 0.3, 0.6))
        along, across = px * angle.sin() + py * angle.cos(), px * angle.cos() - py * angle.sin()
        image = paint(image, (across.abs() < 0.06) & (along > 0) & (along < 2 * HALF_LENGTH), (0.85, 0.35, 0.2))
        image[:, :, -1] = 0.6  # a line between the pictures of a video
        return (image * 255).to(torch.uint8)
